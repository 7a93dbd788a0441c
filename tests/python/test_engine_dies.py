"""An engine dies midway: one generation, one result.

The channel's retry policy is the stock one of proto/berth/v1/service_config.json,
carried out by gRPC itself: no test here calls again after an error, unless it
says so.
"""

import contextlib
import time
import uuid

import grpc
import pytest
from calls import DEADLINE_SECONDS, follow, raw, refused
from cluster import MODEL, ROOT, healthy, wait_for
from conftest import NO_PROXY
from google.rpc import error_details_pb2

SERVICE_CONFIG = (ROOT / "proto" / "berth" / "v1" / "service_config.json").read_text()
TOKENS = 64
# A step of 0.4 s instead of 0.4 ms: it does not end before it is interrupted.
SLOW = 1000
# The longest that two copies may run at once where both engines can be reached.
FENCE_SECONDS = 1.0
ENGINES = (
    *("--profile", "h100", "--time-scale", "0.05"),
    *("--context-length", "131072"),
)
# A longer request is not kept for a retry: 256 KiB unless it is said.
RETRY_BUFFER = ("grpc.per_rpc_retry_buffer_size", 16 << 20)


class Trajectory:
    """A trajectory after its first turn, at a home that is slow from now on."""

    def __init__(self, api, cluster, prompt_tokens=600):
        self.api = api
        self.cluster = cluster
        self.key = f"python-{uuid.uuid4()}"
        self.options = [
            NO_PROXY,
            RETRY_BUFFER,
            ("grpc.service_config", SERVICE_CONFIG),
            ("grpc.service_config_disable_resolution", 1),
        ]
        with self.connect() as channel:
            healthy(api, channel, len(cluster.engines), cluster.check)
            stub = self.stub(channel)
            first = stub.Sample(
                self.request(list(range(prompt_tokens)), 8), timeout=DEADLINE_SECONDS
            )
            self.home = cluster.engines[first.samples[0].route.replica_id]
            prompt = list(range(prompt_tokens)) + list(first.samples[0].token_ids)
            # What the model says, whoever runs it: every token of a simulated
            # engine is a function of the tokens before it.
            reference = self.request(prompt, TOKENS)
            reference.ClearField("cache_affinity_key")
            (sample,) = stub.Sample(reference, timeout=DEADLINE_SECONDS).samples
            self.expected = list(sample.token_ids)
        self.turn = self.request(prompt, TOKENS, idempotency_key=self.key)
        self.prompt_tokens = len(prompt)
        self.begun = time.time()
        self.home.faults(slow=SLOW)

    def connect(self):
        return grpc.insecure_channel(self.cluster.target, options=self.options)

    def stub(self, channel):
        return self.api.sampling_grpc.SamplingServiceStub(channel)

    def request(self, prompt, tokens, **fields):
        return self.api.sampling.SampleRequest(
            model=MODEL,
            cache_affinity_key=self.key,
            token_ids_le=b"".join(i.to_bytes(4, "little") for i in prompt),
            sampling=self.api.sampling.Sampling(max_tokens=tokens, ignore_eos=True),
            **fields,
        )

    def copies(self, engine):
        """The copies of the turn that this start of an engine has seen."""
        return [
            entry
            for entry in engine.history()
            if entry["prompt_tokens"] == self.prompt_tokens
            and entry["arrived"] >= self.begun
        ]

    def all_copies(self):
        return [
            copy
            for engine in self.cluster.engines.values()
            for copy in self.copies(engine)
        ]

    def runs_at_home(self):
        def started():
            return [c for c in self.copies(self.home) if c["started"] is not None]

        (copy,) = wait_for(started, "the turn runs at the trajectory's home")
        assert copy["how"] == "live"
        assert self.all_copies() == [copy]

    def home_dies(self, restart=False):
        """Gives a moment at which it still lived."""
        self.runs_at_home()
        alive = time.time()
        self.home.die()
        if restart:
            self.home.restart()
        else:
            del self.cluster.engines[self.home.replica_id]
        return alive

    def finished_once(self, response, alive):
        """One result, and one copy since the death."""
        (sample,) = response.samples
        assert list(sample.token_ids) == self.expected
        assert not response.replayed
        (copy,) = self.all_copies()
        assert (copy["how"], copy["tokens"]) == ("length", TOKENS)
        assert copy["started"] >= alive

    def replays(self, stub, response):
        """A second call is answered alike and asks no engine."""
        copies = self.all_copies()
        again = stub.Sample(self.turn, timeout=DEADLINE_SECONDS)
        assert again.replayed
        assert raw(again) == raw(response)
        assert self.all_copies() == copies


def attempts(api, response):
    """Number and failure of each attempt in the receipt."""
    (sample,) = response.samples
    return [
        (a.number, a.failure if a.HasField("failure") else None)
        for a in sample.route.attempts
    ]


# Where Berth makes the second attempt itself, both are in one receipt. Where
# the client had to ask again, the receipt has the second one only.
@pytest.mark.parametrize(
    ("serve", "engines", "prompt_tokens", "by_berth"),
    [
        pytest.param((), 2, 600, True, id="by-berth"),
        pytest.param(("--max-attempts", "1"), 2, 600, False, id="by-the-client"),
        pytest.param(("--max-attempts", "1"), 2, 70_000, False, id="a-long-prompt"),
        # Beats and restart must fit into the policy's backoffs, 6 s at least.
        pytest.param(
            ("--heartbeat-interval", "500ms"), 1, 600, False, id="where-it-comes-back"
        ),
    ],
)
def test_an_engine_dies_midway(api, start, serve, engines, prompt_tokens, by_berth):
    cluster = start(serve=serve, engines=engines, engine=ENGINES)
    trajectory = Trajectory(api, cluster, prompt_tokens)
    with trajectory.connect() as channel:
        stub = trajectory.stub(channel)
        call = stub.Sample.future(trajectory.turn, timeout=DEADLINE_SECONDS)
        alive = trajectory.home_dies(restart=engines == 1)
        response = call.result()
        trajectory.finished_once(response, alive)
        lost = [(1, api.sampling.ATTEMPT_FAILURE_LOST)] if by_berth else []
        assert attempts(api, response) == [*lost, (2, None)]
        trajectory.replays(stub, response)
    cluster.check()


def test_without_a_retry_policy_the_loss_is_told_and_a_retry_by_hand_finishes(
    api, start
):
    cluster = start(serve=("--max-attempts", "1"), engine=ENGINES)
    trajectory = Trajectory(api, cluster)
    trajectory.options = [NO_PROXY, ("grpc.enable_retries", 0)]
    with trajectory.connect() as channel:
        stub = trajectory.stub(channel)
        call = stub.Sample.future(trajectory.turn, timeout=DEADLINE_SECONDS)
        alive = trajectory.home_dies()
        with refused(grpc.StatusCode.UNAVAILABLE) as details:
            call.result()
        assert details[error_details_pb2.ErrorInfo].reason == "REPLICA_LOST"
        wait = details[error_details_pb2.RetryInfo].retry_delay
        assert 0 < wait.ToMilliseconds() <= 10_000
        response = stub.Sample(trajectory.turn, timeout=DEADLINE_SECONDS)
        trajectory.finished_once(response, alive)
        trajectory.replays(stub, response)
    cluster.check()


def test_a_connection_breaks_and_the_copy_behind_it_is_stopped(api, start):
    cluster = start(serve=("--max-attempts", "1"), engine=ENGINES)
    trajectory = Trajectory(api, cluster)
    trajectory.home.faults(
        drop_stream={"times": {"next": 1}, "after_tokens": 3}, slow=SLOW
    )
    with trajectory.connect() as channel:
        stub = trajectory.stub(channel)
        call = stub.Sample.future(trajectory.turn, timeout=DEADLINE_SECONDS)

        def stopped():
            return [c for c in trajectory.all_copies() if c["how"] != "live"]

        wait_for(stopped, "the copy is stopped by its id")
        trajectory.home.faults()
        response = call.result()
        (sample,) = response.samples
        assert list(sample.token_ids) == trajectory.expected
        assert attempts(api, response) == [(2, None)]
        lost, finished = sorted(trajectory.all_copies(), key=lambda c: c["arrived"])
        assert (lost["how"], finished["how"]) == ("aborted", "length")
        assert finished["started"] >= lost["ended"] - FENCE_SECONDS
        trajectory.replays(stub, response)
    cluster.check()


def test_a_stream_takes_back_what_a_dead_engine_said(api, start):
    cluster = start(engine=ENGINES)
    trajectory = Trajectory(api, cluster)
    with trajectory.connect() as channel, contextlib.ExitStack() as end:
        stub = trajectory.stub(channel)
        stream = stub.SampleStream(trajectory.turn, timeout=DEADLINE_SECONDS)
        end.callback(stream.cancel)
        alive = []

        def watched():
            for event in stream:
                if event.WhichOneof("event") == "delta" and not alive:
                    alive.append(trajectory.home_dies())
                yield event

        held, final, kinds = follow(watched())
        assert kinds.count("reset") == 1
        assert held == {0: trajectory.expected}
        trajectory.finished_once(final, *alive)
        trajectory.replays(stub, final)
    cluster.check()

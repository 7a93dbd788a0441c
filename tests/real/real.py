"""What the checks against real engines share: Berth's API as a stock client has it,
and the engines themselves, asked past Berth for what they say of what they do.

Needs grpcio and grpcio-tools."""

import importlib
import importlib.resources
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import grpc
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOCABULARY = 32_000
# Of one call.
DEADLINE = 180


def compile_protos(out):
    """The generated modules of proto/berth/v1, by their names."""
    wellknown = importlib.resources.files("grpc_tools") / "_proto"
    protos = sorted((ROOT / "proto").glob("berth/v1/*.proto"))
    code = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT / 'proto'}",
            f"--proto_path={wellknown}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            *map(str, protos),
        ]
    )
    assert code == 0, "the protos do not compile"
    sys.path.insert(0, out)


def get_text(url, path, timeout=10):
    with urllib.request.urlopen(url + path, timeout=timeout) as reply:
        return reply.read().decode()


def get(url, path):
    return json.loads(get_text(url, path))


def post(url, path, body=None):
    request = urllib.request.Request(
        url + path,
        json.dumps(body or {}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read()


def wait_for(condition, what, seconds):
    """How long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - start


class Sglang:
    """An SGLang server. The rank that served stands in its replies, so receipts
    repeat what the engine says."""

    kind = "sglang"
    context = 32_768
    page = 1
    # It says in each reply which rank served.
    tells_rank = True
    says_log_probabilities_of_prompt_at_temperature = True

    def __init__(self, url):
        self.url = url

    def busy(self):
        """Requests that run or wait, by rank."""
        loads = get(self.url, "/v1/loads?include=core")["loads"]
        return {x["dp_rank"]: x["num_running_reqs"] + x["num_waiting_reqs"] for x in loads}

    def facts(self, replica):
        told = get(self.url, "/server_info")
        assert replica.engine_version == told["version"]
        assert replica.model == told["served_model_name"]
        assert replica.page_size == told["page_size"]
        can = replica.capabilities
        assert can.incremental_streaming == told["incremental_streaming_output"]
        assert [r.kv_capacity_tokens for r in replica.ranks] == [32_768] * 2

    def abort_all(self):
        post(self.url, "/abort_request", {"rid": "", "abort_all": True})

    def set_version(self, version):
        """New weights, while what runs goes on."""
        post(
            self.url,
            "/update_weight_version",
            {"new_version": version, "abort_all_requests": False},
        )

    def looks_well(self):
        ready = urllib.request.urlopen(self.url + "/ready", timeout=5).status
        return ready == 200 and sorted(self.busy()) == [0, 1]


class Vllm:
    """A vLLM server in development mode. Which rank served stands in its metrics
    only."""

    kind = "vllm"
    context = 16_384
    page = 128
    tells_rank = False

    def __init__(self, url):
        self.url = url

    def metric(self, name):
        """Sums over all other labels, by rank."""
        found = {}
        for line in get_text(self.url, "/metrics").splitlines():
            label = re.match(name + r'\{(?:.*,)?engine="(\d+)"[^}]*\} (\S+)$', line)
            if label:
                rank = int(label[1])
                found[rank] = found.get(rank, 0) + round(float(label[2]))
        return found

    def busy(self):
        running = self.metric("vllm:num_requests_running")
        waiting = self.metric("vllm:num_requests_waiting")
        return {rank: running[rank] + waiting[rank] for rank in running}

    def prompt_tokens(self):
        """Of all requests so far, by rank."""
        return self.metric("vllm:prompt_tokens_total")

    def facts(self, replica):
        assert replica.engine_version == get(self.url, "/version")["version"]
        model = get(self.url, "/v1/models")["data"][0]
        assert replica.model == model["id"]
        assert replica.context_length == model["max_model_len"]
        assert replica.capabilities.incremental_streaming
        assert all(r.kv_capacity_tokens >= 16_384 for r in replica.ranks)

    def abort_all(self):
        post(self.url, "/pause?mode=abort")
        post(self.url, "/resume")

    def set_version(self, version):
        post(self.url, "/pause?mode=keep")
        post(self.url, "/update_weight_version", {"new_version": version})
        post(self.url, "/resume")


ENGINES = {"sglang": Sglang, "vllm": Vllm}


def processes(group):
    """Pid and title of each process of a group."""
    found = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            after = stat.read_text().rpartition(")")[2].split()
            if int(after[2]) == group and after[0] != "Z":
                title = (stat.parent / "cmdline").read_bytes()
                found[int(stat.parent.name)] = title.replace(b"\0", b" ").decode(
                    errors="replace"
                )
        except (OSError, ValueError):
            continue
    return found


def process_of(group, pattern):
    """The one process of a group whose title matches."""
    every = processes(group)
    found = [pid for pid, title in every.items() if re.search(pattern, title)]
    assert len(found) == 1, f"{pattern}: {found} of {sorted(every.values())}"
    return found[0]


class Berth:
    """A control plane and the engines behind it."""

    def __init__(self, address, kind="sglang", urls=()):
        self.out = tempfile.TemporaryDirectory()
        compile_protos(self.out.name)
        self.pb = importlib.import_module("berth.v1.sampling_pb2")
        self.fleet_pb = importlib.import_module("berth.v1.fleet_pb2")
        grpc_of = importlib.import_module("berth.v1.sampling_pb2_grpc")
        fleet_of = importlib.import_module("berth.v1.fleet_pb2_grpc")
        self.address = address
        # A channel that was refused once waits a second before it tries again.
        self.channel = grpc.insecure_channel(
            address,
            options=[
                ("grpc.enable_retries", 0),
                ("grpc.initial_reconnect_backoff_ms", 20),
                ("grpc.min_reconnect_backoff_ms", 20),
                ("grpc.max_reconnect_backoff_ms", 50),
            ],
        )
        self.sampling = grpc_of.SamplingServiceStub(self.channel)
        self.fleet = fleet_of.FleetServiceStub(self.channel)
        self.engines = [ENGINES[kind](url) for url in urls]
        self.engine = ENGINES[kind]
        self.random = random.SystemRandom()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()
        self.out.cleanup()

    def ids(self, count):
        # Past the ids that could end a generation.
        return [self.random.randrange(10, VOCABULARY) for _ in range(count)]

    def request(self, prompt, max_tokens, **fields):
        return self.pb.SampleRequest(
            token_ids=self.pb.TokenIds(ids=prompt),
            sampling=self.pb.Sampling(
                max_tokens=max_tokens, ignore_eos=True, temperature=0.0
            ),
            **fields,
        )

    def sample(self, *args, **fields):
        return self.sampling.Sample(self.request(*args, **fields), timeout=DEADLINE)

    def replicas(self):
        listed = self.fleet.ListReplicas(self.fleet_pb.ListReplicasRequest(), timeout=10)
        return listed.replicas

    def all_here(self):
        """Waits for the sidecars."""

        def here():
            replicas = self.replicas()
            healthy = self.fleet_pb.REPLICA_HEALTH_HEALTHY
            return len(replicas) == len(self.engines) and all(
                r.health == healthy for r in replicas
            )

        wait_for(here, "all replicas are registered", 60)

    def replica(self, replica_id):
        asked = self.fleet_pb.GetReplicaRequest(replica_id=replica_id)
        return self.fleet.GetReplica(asked, timeout=10).replica

    def reason(self, route):
        return self.pb.RouteReason.Name(route.reason).removeprefix("ROUTE_REASON_")

    def health(self, replica_id):
        name = self.fleet_pb.ReplicaHealth.Name(self.replica(replica_id).health)
        return name.removeprefix("REPLICA_HEALTH_")

    def counters(self):
        stats = self.fleet.GetStats(self.fleet_pb.GetStatsRequest(), timeout=10)
        return stats.counters

    def idle(self):
        return all(sum(engine.busy().values()) == 0 for engine in self.engines)

    def ranks(self):
        return 2 * len(self.engines)

    def engine_of(self, replica_id):
        endpoint = self.replica(replica_id).endpoint
        return next(e for e in self.engines if e.url == endpoint)


class Trajectory:
    """One rollout: its key, its history, and what its next turn must find cached."""

    def __init__(self, berth, prompt_tokens, turn_tokens=37):
        self.berth = berth
        self.key = f"real-{berth.random.getrandbits(64):016x}"
        self.history = berth.ids(prompt_tokens)
        self.turn_tokens = turn_tokens
        # Tokens whose KV the rank holds: all but the last one's.
        self.held = 0
        self.place = None
        self.turns = []

    def request(self, max_tokens, **fields):
        return self.berth.request(
            self.history, max_tokens, cache_affinity_key=self.key, **fields
        )

    def expected(self):
        """Cached tokens of the next turn at home."""
        usable = min(self.held, len(self.history) - 1)
        return usable // self.berth.engine.page * self.berth.engine.page

    def took(self, response, max_tokens, cold=False, guest=False):
        """Checks a turn's response, and goes on from it. `cold`: it has moved.
        `guest`: it was served away from home, where more may be cached than Berth
        can know of."""
        sample = response.samples[0]
        route = sample.route
        if self.berth.engine.tells_rank:
            assert route.HasField("served_rank"), "the engine does not say who served"
            assert route.served_rank == route.rank, route
        place = (route.replica_id, route.rank)
        expected = 0 if cold or guest or self.place is None else self.expected()
        reason = self.berth.reason(route)
        self.turns.append(
            (reason, *place, sample.usage.cached_tokens, expected, len(self.history))
        )
        assert len(sample.token_ids) == max_tokens, len(sample.token_ids)
        assert sample.usage.prompt_tokens == len(self.history)
        if not guest:
            assert sample.usage.cached_tokens == expected, self.turns
        assert route.expected_cached_tokens == expected, (route, self.turns)
        self.held = len(self.history) + len(sample.token_ids) - 1
        self.history = (
            self.history + list(sample.token_ids) + self.berth.ids(self.turn_tokens)
        )
        self.place = place
        return reason

    def turn(self, max_tokens=16, cold=False, guest=False):
        request = self.request(max_tokens)
        response = self.berth.sampling.Sample(request, timeout=DEADLINE)
        return self.took(response, max_tokens, cold, guest)

    def begin(self, max_tokens, **fields):
        """A turn in flight; give its result to `took`."""
        return InFlight(self.berth, self.request(max_tokens, **fields))


class InFlight:
    """A turn that is streamed, read by a thread of its own."""

    def __init__(self, berth, request):
        # Its engine has begun with it: it has said its first tokens.
        self.runs = threading.Event()
        self.over = threading.Event()
        self.final, self.error = None, None
        self.events = berth.sampling.SampleStream(request, timeout=DEADLINE)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        try:
            tokens = []
            for event in self.events:
                kind = event.WhichOneof("event")
                if kind == "delta":
                    assert event.delta.offset == len(tokens), "a gap in the stream"
                    tokens.extend(event.delta.token_ids)
                    self.runs.set()
                elif kind == "reset":
                    del tokens[event.reset.keep :]
                elif kind == "final":
                    assert tokens == list(event.final.samples[0].token_ids), "deltas"
                    self.final = event.final
        except (AssertionError, grpc.RpcError) as error:
            self.error = error
        finally:
            self.over.set()
            self.runs.set()

    def result(self):
        self.over.wait(DEADLINE + 10)
        if self.error is not None:
            raise self.error
        assert self.final is not None, "the stream ended without its final message"
        return self.final


def run_checks(checks):
    """Runs each, prints what it says, and returns the exit status."""
    failed = []
    for check in checks:
        print(f"{check.__name__}: {check.__doc__}", flush=True)
        begun = time.monotonic()
        try:
            check()
            print(f"  ok, {time.monotonic() - begun:.1f} s", flush=True)
        except Exception as error:  # noqa: BLE001, every fault is one
            failed.append(check.__name__)
            print(f"  FAULT: {type(error).__name__}: {error}", flush=True)
    print(f"FAILED: {', '.join(failed)}" if failed else "ok: all of them", flush=True)
    return 1 if failed else 0


def spawn(log, *command):
    """A process that leads a group of its own."""
    with open(log, "wb") as out:
        return subprocess.Popen(
            [os.fspath(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )

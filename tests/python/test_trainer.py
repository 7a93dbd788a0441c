"""A trainer in Python with nothing but stock gRPC: what it relies on."""

import random
import uuid

import grpc
import pytest
from calls import DEADLINE_SECONDS, follow, raw, refused
from cluster import wait_for
from google.rpc import error_details_pb2


@pytest.fixture
def name():
    """Not used before: a server that runs already may know older ones."""
    return f"python-{uuid.uuid4()}"


@pytest.fixture
def prompt(replicas):
    """Random ids, so that no cache knows them."""
    vocabulary = min(r.vocab_size for r in replicas)
    return [random.SystemRandom().randrange(vocabulary) for _ in range(600)]


@pytest.fixture
def request_for(api, replicas):
    """Makes a request for a prompt, 32 tokens to generate."""

    def make(prompt, **fields):
        return api.sampling.SampleRequest(
            model=replicas[0].model,
            token_ids=api.sampling.TokenIds(ids=prompt),
            sampling=api.sampling.Sampling(max_tokens=32, ignore_eos=True),
            **fields,
        )

    return make


def test_the_second_turn_of_a_trajectory_is_cached_on_the_same_rank(
    api, sampling, replicas, name, prompt, request_for
):
    first = sampling.Sample(
        request_for(prompt, cache_affinity_key=name), timeout=DEADLINE_SECONDS
    )
    (one,) = first.samples
    assert len(one.token_ids) == 32
    assert one.stop_reason == api.sampling.STOP_REASON_LENGTH
    assert one.usage.prompt_tokens == 600
    assert one.usage.completion_tokens == 32
    assert one.usage.cached_tokens == 0
    assert one.route.reason == api.sampling.ROUTE_REASON_NEW_KEY

    history = prompt + list(one.token_ids)
    second = sampling.Sample(
        request_for(history + prompt[:5], cache_affinity_key=name),
        timeout=DEADLINE_SECONDS,
    )
    (two,) = second.samples
    assert two.route.reason == api.sampling.ROUTE_REASON_PINNED
    for field in ("replica_id", "incarnation", "rank"):
        assert getattr(two.route, field) == getattr(one.route, field), field
    # All of the history but its last token, which was never computed, in whole
    # pages.
    (page,) = [r.page_size for r in replicas if r.replica_id == two.route.replica_id]
    assert two.usage.cached_tokens == (len(history) - 1) // page * page
    assert two.route.expected_cached_tokens == two.usage.cached_tokens

    finish = api.sampling.FinishTrajectoryRequest(
        model=replicas[0].model, cache_affinity_key=name
    )
    assert sampling.FinishTrajectory(finish, timeout=DEADLINE_SECONDS).unpinned
    assert not sampling.FinishTrajectory(finish, timeout=DEADLINE_SECONDS).unpinned


def test_all_violations_of_a_bad_request_come_at_once(
    sampling, name, prompt, request_for
):
    request = request_for(prompt, cache_affinity_key="  ", num_samples=0)
    request.idempotency_key = name
    request.sampling.top_p = 2.0
    request.sampling.temperature = -1.0
    with refused(grpc.StatusCode.INVALID_ARGUMENT) as details:
        sampling.Sample(request, timeout=DEADLINE_SECONDS)
    assert details[error_details_pb2.ErrorInfo].reason == "INVALID_REQUEST"
    violations = details[error_details_pb2.BadRequest].field_violations
    assert {v.field for v in violations} == {
        "cache_affinity_key",
        "num_samples",
        "sampling.top_p",
        "sampling.temperature",
    }
    assert all(v.description for v in violations)

    # It was not kept under its key: the same key serves once it is right.
    fixed = request_for(prompt, idempotency_key=name)
    assert not sampling.Sample(fixed, timeout=DEADLINE_SECONDS).replayed


def test_a_retry_under_the_same_key_is_a_replay_to_the_byte(
    api, sampling, name, prompt, request_for
):
    request = request_for(prompt, idempotency_key=name, num_samples=2)
    request.logprobs.output = True
    first = sampling.Sample(request, timeout=DEADLINE_SECONDS)
    assert not first.replayed
    assert [s.index for s in first.samples] == [0, 1]
    assert all(len(s.logprobs) == 32 for s in first.samples)

    again = sampling.Sample(request, timeout=DEADLINE_SECONDS)
    assert again.replayed
    assert raw(again) == raw(first)
    assert again.produced_at == first.produced_at

    # The same ids in the other encoding are the same request.
    request.token_ids_le = b"".join(i.to_bytes(4, "little") for i in prompt)
    packed = sampling.Sample(request, timeout=DEADLINE_SECONDS)
    assert packed.replayed
    assert raw(packed) == raw(first)

    kept = sampling.GetSample(
        api.sampling.GetSampleRequest(idempotency_key=name), timeout=DEADLINE_SECONDS
    )
    assert kept.state == api.sampling.GENERATION_STATE_DONE
    assert raw(kept.response) == raw(first)


def test_a_key_cannot_be_used_for_other_parameters(sampling, name, prompt, request_for):
    request = request_for(prompt, idempotency_key=name)
    sampling.Sample(request, timeout=DEADLINE_SECONDS)
    request.sampling.max_tokens = 33
    with refused(grpc.StatusCode.ALREADY_EXISTS) as details:
        sampling.Sample(request, timeout=DEADLINE_SECONDS)
    assert details[error_details_pb2.ErrorInfo].reason == "IDEMPOTENCY_KEY_REUSED"


def test_the_deltas_of_a_stream_add_up_to_its_final_message(
    sampling, name, prompt, request_for
):
    request = request_for(prompt, idempotency_key=name, num_samples=2)
    held, final, kinds = follow(sampling.SampleStream(request, timeout=DEADLINE_SECONDS))
    assert "delta" in kinds
    assert [s.index for s in final.samples] == [0, 1]
    assert held == {s.index: list(s.token_ids) for s in final.samples}
    assert all(len(tokens) == 32 for tokens in held.values())

    # The unary call and a second stream of this key give the same result.
    unary = sampling.Sample(request, timeout=DEADLINE_SECONDS)
    assert unary.replayed
    assert raw(unary) == raw(final)
    held_again, final_again, _ = follow(
        sampling.SampleStream(request, timeout=DEADLINE_SECONDS)
    )
    assert final_again.replayed
    assert held_again == held
    assert raw(final_again) == raw(final)


def test_a_deadline_ends_the_call_and_the_generation(
    sampling, cluster, prompt, request_for
):
    request = request_for(prompt)
    request.sampling.max_tokens = 8000
    with pytest.raises(grpc.RpcError) as caught:
        sampling.Sample(request, timeout=0.5)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    if cluster is None:
        return

    def ended():
        found = [
            entry
            for engine in cluster.engines.values()
            for entry in engine.history()
            if entry["prompt_tokens"] == 600 and entry["how"] in ("live", "aborted")
        ]
        return found and all(entry["how"] == "aborted" for entry in found)

    wait_for(ended, "the engine stops, since nobody can come back for it")


def test_a_retry_after_a_deadline_joins_what_was_begun(
    sampling, cluster, name, prompt, request_for
):
    request = request_for(prompt[:599], idempotency_key=name)
    request.sampling.max_tokens = 2000
    with pytest.raises(grpc.RpcError) as caught:
        sampling.Sample(request, timeout=0.5)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    (one,) = sampling.Sample(request, timeout=DEADLINE_SECONDS).samples
    assert len(one.token_ids) == 2000
    if cluster:
        (entry,) = [
            entry
            for engine in cluster.engines.values()
            for entry in engine.history()
            if entry["prompt_tokens"] == 599
        ]
        assert (entry["how"], entry["tokens"]) == ("length", 2000)

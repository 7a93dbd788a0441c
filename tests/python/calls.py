"""What a caller does with replies, errors and streams."""

import contextlib

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

DEADLINE_SECONDS = 60


def details_of(error):
    """The google.rpc details of a failed call, by type."""
    status = rpc_status.from_call(error)
    assert status is not None, f"no details: {error}"
    found = {}
    for packed in status.details:
        for kind in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.BadRequest,
            error_details_pb2.RetryInfo,
        ):
            message = kind()
            if packed.Unpack(message):
                found[kind] = message
    return found


@contextlib.contextmanager
def refused(code):
    """Expects an error with this code; its details are in what it yields."""
    details = {}
    with pytest.raises(grpc.RpcError) as caught:
        yield details
    assert caught.value.code() == code, caught.value
    details.update(details_of(caught.value))
    info = details[error_details_pb2.ErrorInfo]
    assert info.domain == "berth.dev"


def raw(response):
    return [s.SerializeToString(deterministic=True) for s in response.samples]


def follow(stream):
    """Obeys the events of a stream; gives what it held for each sample before
    the final message, that message, and the kinds of events in order."""
    held = {}
    kinds = []
    final = None
    for event in stream:
        assert final is None, "nothing follows the final message"
        kind = event.WhichOneof("event")
        kinds.append(kind)
        if kind == "delta":
            tokens = held.setdefault(event.delta.sample, [])
            assert event.delta.offset == len(tokens)
            tokens.extend(event.delta.token_ids)
        elif kind == "reset":
            del held[event.reset.sample][event.reset.keep :]
        elif kind == "final":
            final = event.final
    assert kinds[0] == "started" and kinds.count("started") == 1
    assert final is not None, "the stream ended without its final message"
    return held, final, kinds

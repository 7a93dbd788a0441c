"""How long it takes from the start of a sidecar to the first token that is routed to
its engine, the engine being ready: prints it.

    first_token.py BERTH KIND OUT ENGINE_URL [SIDECAR_OPTION...]
"""

import pathlib
import socket
import sys
import time

import grpc

from real import Berth, run_checks, spawn, wait_for

# From the start of the sidecar's process; the machine may be busy.
BOUND_SECONDS = 10


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end(process):
    process.terminate()
    try:
        process.wait(40)
    finally:
        process.kill()


def main(binary, kind, out, url, options):
    out = pathlib.Path(out)
    grpc_port, admin_port = free_port(), free_port()
    address = f"127.0.0.1:{grpc_port}"
    serve = spawn(
        out / "first-serve.log",
        binary,
        "serve",
        "--listen",
        address,
        "--admin-listen",
        f"127.0.0.1:{admin_port}",
        "--data-dir",
        out / "first-data",
    )

    def first_token():
        """From the start of a sidecar to the first token of a ready engine."""
        with Berth(address, kind, [url]) as berth:
            grpc.channel_ready_future(berth.channel).result(30)
            request = berth.request(berth.ids(16), 1)

            def once():
                begun = time.monotonic()
                berth.sampling.Sample(request, timeout=30)
                return time.monotonic() - begun

            begun = time.monotonic()
            sidecar = spawn(
                out / "first-sidecar.log",
                binary,
                "sidecar",
                "--control-plane",
                f"http://{address}",
                "--engine",
                kind,
                "--engine-url",
                url,
                "--replica-id",
                "first",
                *options,
            )
            try:
                registered, refused = None, 0
                while True:
                    assert sidecar.poll() is None, "the sidecar has ended"
                    now = time.monotonic()
                    if registered is None and berth.replicas():
                        registered = now - begun
                    try:
                        once()
                        break
                    except grpc.RpcError as error:
                        codes = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND)
                        assert error.code() in codes, error
                        refused += 1
                        assert now - begun < 60, error
                    time.sleep(0.002)
                took = time.monotonic() - begun
                again = sorted(once() for _ in range(5))[2]
                shown = "just before" if registered is None else f"after {registered * 1e3:.0f} ms"
                print(
                    f"  first token {took * 1e3:.0f} ms after the sidecar's start "
                    f"(registered {shown}, {refused} calls refused before); the next "
                    f"calls take {again * 1e3:.0f} ms"
                )
                assert took < BOUND_SECONDS, f"more than {BOUND_SECONDS} s"
            finally:
                end(sidecar)
            wait_for(
                lambda: all(berth.health(r.replica_id) == "DEAD" for r in berth.replicas()),
                "the sidecar's leave",
                10,
            )

    try:
        return run_checks([first_token])
    finally:
        end(serve)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:5], sys.argv[5:]))

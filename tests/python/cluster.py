"""A control plane with simulated engines, as processes of their own."""

import contextlib
import http.client
import json
import os
import pathlib
import random
import socket
import subprocess
import time
import urllib.request

import grpc

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_SECONDS = 60
STOP_SECONDS = 15
MODEL = "sim-model"


class Died(Exception):
    """A process ended while it was waited for."""


class Processes:
    """Processes of one cluster, each stopped by its own pid."""

    def __init__(self, binary, logs):
        self.binary = binary
        self.logs = logs
        self.running = []

    def start(self, name, *args):
        log = self.logs / f"{len(self.running)}-{name}.log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [self.binary, *args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(),
            )
        self.running.append((name, process, log))
        return process, log

    def start_listening(self, name, args_for, ports=None):
        """Starts args_for(port) and waits until the port accepts connections;
        gives the process and the port.

        Another process may take the port between the choice and the start:
        then the next one is tried.
        """
        for port in ports or (free_port() for _ in range(5)):
            process, log = self.start(name, *args_for(port))
            try:
                wait_for(lambda: accepts(port), f"{name} on port {port}", process, log)
                return process, port
            except Died:
                self.forget(process)
                if "in use" not in tail(log).lower():
                    raise
        raise AssertionError(f"{name}: no free port")

    def forget(self, ended):
        """This one is known to have ended."""
        self.running = [r for r in self.running if r[1] is not ended]

    def check(self):
        for name, process, log in self.running:
            if process.poll() is not None:
                raise AssertionError(
                    f"{name} ended with {process.returncode}:\n{tail(log)}"
                )

    def stop(self):
        # The newest first: sidecars take their leave before the rest goes.
        for _, process, _ in reversed(self.running):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


class Engine:
    """A simulated engine, which lives on the same port after a restart."""

    def __init__(self, processes, replica_id, flags):
        self.processes = processes
        self.replica_id = replica_id
        self.flags = flags
        self.process, self.port = self._start(None)

    def _start(self, ports):
        return self.processes.start_listening(
            f"engine-{self.replica_id}",
            lambda port: [
                "sim-engine",
                "--port",
                str(port),
                "--model",
                MODEL,
                "--incremental-streaming-output",
                *self.flags,
            ],
            ports,
        )

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def _call(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        # Without the proxies of the environment.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, data, timeout=START_SECONDS) as reply:
            return json.load(reply)

    def faults(self, **faults):
        """These from now on, and no others."""
        self._call("/sim/faults", faults)

    def die(self):
        """Every connection is cut and the port refuses."""
        # The reply may be cut as well.
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._call("/sim/faults", {"die": True})
        self.process.wait(STOP_SECONDS)
        self.processes.forget(self.process)

    def restart(self):
        """After its end, on the port that it had, with an empty cache."""
        self.process, _ = self._start([self.port])

    def history(self):
        """All its requests of this start, the oldest first."""
        return self._call("/sim/history")["entries"]


class Cluster:
    """A control plane, its engines and a sidecar beside each of them."""

    def __init__(self, binary, work, serve=(), engines=2, engine=()):
        self.processes = Processes(binary, work)
        self.engines = {}
        try:
            _, self.port = self.processes.start_listening(
                "serve",
                lambda port: [
                    "serve",
                    "--listen",
                    f"127.0.0.1:{port}",
                    "--admin-listen",
                    "127.0.0.1:0",
                    "--data-dir",
                    str(work / f"data-{port}"),
                    *serve,
                ],
            )
            for replica in (f"sim-{i}" for i in range(engines)):
                self.engines[replica] = Engine(self.processes, replica, engine)
                self.processes.start(
                    f"sidecar-{replica}",
                    "sidecar",
                    "--control-plane",
                    f"http://{self.target}",
                    "--engine-url",
                    self.engines[replica].url,
                    "--replica-id",
                    replica,
                )
        except BaseException:
            self.stop()
            raise

    @property
    def target(self):
        return f"127.0.0.1:{self.port}"

    def check(self):
        self.processes.check()

    def stop(self):
        self.processes.stop()


def environment():
    """Without our own variables: the binary refuses those that it does not
    know, and the others would change what is tested."""
    return {k: v for k, v in os.environ.items() if not k.startswith("BERTH_")}


def free_port():
    """A port that nobody listens on, below the range that the kernel gives to
    outgoing connections, so that it is still free after a restart."""
    for _ in range(100):
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise AssertionError("no free port")


def accepts(port):
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


def tail(log):
    return log.read_text(errors="replace")[-4000:]


def wait_for(condition, what, process=None, log=None):
    """Gives what the condition gives as soon as that is true."""
    end = time.monotonic() + START_SECONDS
    while True:
        # The process first: another one may answer on the port of a dead one.
        if process is not None and process.poll() is not None:
            raise Died(f"{what}: ended with {process.returncode}:\n{tail(log)}")
        if found := condition():
            return found
        if time.monotonic() > end:
            seen = tail(log) if log else ""
            raise AssertionError(f"{what}: not there after {START_SECONDS} s\n{seen}")
        time.sleep(0.05)


def healthy(api, channel, wanted, check=lambda: None):
    """Waits for so many healthy replicas of one model and gives them."""
    fleet = api.fleet_grpc.FleetServiceStub(channel)

    def listed():
        check()
        try:
            listed = fleet.ListReplicas(api.fleet.ListReplicasRequest(), timeout=5)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                return []
            raise
        found = [
            r for r in listed.replicas if r.health == api.fleet.REPLICA_HEALTH_HEALTHY
        ]
        return found if len(found) >= wanted else []

    found = wait_for(listed, f"{wanted} healthy replicas")
    return [r for r in found if r.model == found[0].model]

"""Servers that leave, die, or look well and are not, with trajectories on them: what
runs is finished, what lived there moves once, nothing else does. It ends servers.

    faults.py CONTROL_PLANE BERTH KIND FROZEN_AFTER ENGINE_URL=PROCESS_GROUP...

FROZEN_AFTER is what the sidecars were told, in seconds; used with SGLang only.
"""

import os
import signal
import subprocess
import sys
import time

import grpc

from real import DEADLINE, Berth, Trajectory, process_of, processes, run_checks, wait_for

GRACE_SECONDS = 10
# Of a turn that is in flight when something happens.
LONG = 400
# A rank that its sidecar calls unwell is given up after a lease.
LEASE_SECONDS = 12
# How long a server may take to be out of routing once its process is gone.
GONE_SECONDS = 20
# Its beats, the sidecar's look at it, and a machine that has other things to do.
SLACK_SECONDS = 15


class Faults(Berth):
    """The checks, in the order in which they can be done with two servers."""

    def __init__(self, address, binary, kind, frozen_after, groups):
        super().__init__(address, kind, list(groups))
        self.binary = binary
        self.frozen_after = frozen_after
        self.groups = groups

    # --- trajectories ---------------------------------------------------------

    def settle(self, count, first=200):
        """New trajectories, two turns each, on every rank that serves."""
        every = [Trajectory(self, first + 40 * i) for i in range(count)]
        for trajectory in every:
            trajectory.turn()
            assert trajectory.turn() == "PINNED", trajectory.turns
        return every

    def run_all(self, every, concerned):
        """A long turn of each; those concerned are running at their engine."""
        calls = [(t, t.begin(LONG, idempotency_key=f"{t.key}/long")) for t in every]
        theirs = [call for trajectory, call in calls if trajectory in concerned]
        wait_for(lambda: all(call.runs.is_set() for call in theirs), "they run", 60)
        over = sum(call.over.is_set() for call in theirs)
        assert not over, f"{over} of {len(theirs)} turns are over before all of them run"
        return calls

    def living(self):
        return [e for e in self.engines if processes(self.groups[e.url])]

    @staticmethod
    def of(every, replica_id, rank=None):
        return [
            t
            for t in every
            if t.place[0] == replica_id and rank in (None, t.place[1])
        ]

    def stay(self, every):
        """The next turn of each is where the last one was, and warm."""
        for trajectory in every:
            before = trajectory.place
            assert trajectory.turn() == "PINNED", trajectory.turns
            assert trajectory.place == before, trajectory.turns

    def move(self, every, reason, to):
        """The next turn of each is elsewhere, once, and cold; then it is at home."""
        for trajectory in every:
            before = trajectory.place
            assert trajectory.turn(cold=True) == reason, trajectory.turns
            assert trajectory.place != before, trajectory.turns
            assert trajectory.place in to, trajectory.turns
        self.stay(every)

    def finish(self, every):
        for trajectory in every:
            self.sampling.FinishTrajectory(
                self.pb.FinishTrajectoryRequest(cache_affinity_key=trajectory.key),
                timeout=10,
            )

    def places(self, every):
        return ", ".join(
            f"{replica}:{rank} {sum(t.place == (replica, rank) for t in every)}"
            for replica, rank in sorted({t.place for t in every})
        )

    # --- the checks -----------------------------------------------------------

    def operate(self, *command):
        return subprocess.run(
            [self.binary, *command, "--url", f"http://{self.address}"],
            check=False,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )

    def drain(self):
        """`berth drain`: turns in flight finish, and keys move after the grace."""
        leaving, staying = sorted(r.replica_id for r in self.replicas())
        every = self.settle(8)
        assert len({t.place for t in every}) == 4, self.places(every)
        print(f"  trajectories: {self.places(every)}")
        theirs, others = self.of(every, leaving), self.of(every, staying)
        # One is between its turns.
        between = theirs[0]
        calls = self.run_all([t for t in every if t is not between], theirs)
        begun = time.monotonic()
        done = self.operate("drain", leaving, "--grace", f"{GRACE_SECONDS}s")
        assert done.returncode == 0, done.stderr
        print(f"  {done.stdout.strip()}")
        assert self.health(leaving) == "DRAINING"
        # Until the grace is over it may stay.
        self.stay([between])
        within = time.monotonic() - begun
        assert within < GRACE_SECONDS, "the machine is too slow for this grace"
        new = Trajectory(self, 300)
        assert new.turn() == "NEW_KEY" and new.place[0] == staying, new.turns
        for trajectory, call in calls:
            response = call.result()
            assert trajectory.took(response, LONG) == "PINNED", trajectory.turns
            assert len(response.samples[0].route.attempts) == 1
        finished = time.monotonic() - begun
        left = self.operate("drain", leaving, "--wait=120s")
        assert left.returncode == 0, left.stderr
        waited = time.monotonic() - begun
        assert waited >= GRACE_SECONDS, "the wait ended before the grace did"
        print(
            f"  one more turn there {within:.1f} s after the drain began; the "
            f"{len(calls)} in flight finished after {finished:.1f} s, each in one "
            f"attempt; grace {GRACE_SECONDS} s; `drain --wait` ended after {waited:.1f} s"
        )
        self.move(theirs, "DRAINING", [(staying, 0), (staying, 1)])
        self.stay(others)
        resumed = self.operate("resume", leaving)
        assert resumed.returncode == 0, resumed.stderr
        wait_for(lambda: self.health(leaving) == "HEALTHY", "healthy again", 20)
        # Nothing goes back.
        self.stay(every)
        back = Trajectory(self, 300)
        assert back.turn() == "NEW_KEY" and back.place[0] == leaving, back.turns
        print(
            f"  {len(theirs)} trajectories moved, once, cold for one turn; "
            f"{len(others)} stayed; resumed, {leaving} has new ones only"
        )
        self.finish([*every, new, back])

    def kill(self):
        """A server is killed midway: its turns run elsewhere, and nothing is lost."""
        dying, staying = sorted(r.replica_id for r in self.replicas())
        group = self.groups[self.replica(dying).endpoint]
        every = self.settle(8)
        theirs, others = self.of(every, dying), self.of(every, staying)
        assert len(theirs) == len(others) == 4, self.places(every)
        before = self.counters()
        calls = self.run_all(every, theirs)
        if self.engine.kind == "vllm":
            # One of its engines: the server takes the rest down with it, and ends
            # what ran at the other one in an orderly way, 200 and all.
            os.kill(process_of(group, r"EngineCore_DP1"), signal.SIGKILL)
            what = "one engine process of two"
        else:
            os.killpg(group, signal.SIGKILL)
            what = "all its processes at once"
        begun = time.monotonic()
        last, failures, slowest = {}, {}, 0.0
        for trajectory, call in calls:
            response = call.result()
            slowest = max(slowest, time.monotonic() - begun)
            sample = response.samples[0]
            last[trajectory.key] = sample
            moved = trajectory in theirs
            reason = trajectory.took(response, LONG, cold=moved)
            attempts = sample.route.attempts
            assert sum(a.kept_tokens for a in attempts) == LONG, attempts
            assert not attempts[-1].HasField("failure")
            if moved:
                assert len(attempts) > 1, "it was not running there"
                assert attempts[0].replica_id == dying
                assert trajectory.place[0] == staying
            else:
                assert len(attempts) == 1 and reason == "PINNED", trajectory.turns
            for attempt in attempts[:-1]:
                name = self.pb.AttemptFailure.Name(attempt.failure)
                name = name.removeprefix("ATTEMPT_FAILURE_")
                failures[name] = failures.get(name, 0) + 1
        wait_for(
            lambda: self.health(dying) in ("DEAD", "UNHEALTHY"),
            "the killed server is out of routing",
            GONE_SECONDS,
        )
        # A caller that asks again has the same, and nothing is generated.
        for trajectory, _ in calls:
            again = self.sampling.GetSample(
                self.pb.GetSampleRequest(idempotency_key=f"{trajectory.key}/long"),
                timeout=10,
            ).response
            assert again.replayed and again.samples[0] == last[trajectory.key]
        self.stay(every)
        after = self.counters()
        moved = {
            name: after[name] - before[name]
            for name in sorted(after)
            if after[name] != before[name]
        }
        print(
            f"  killed: {what}; {len(theirs)} turns of {len(calls)} ran there, all "
            f"finished with {LONG} tokens, the last {slowest:.1f} s after; attempts that "
            f"failed: {failures}; {dying} is {self.health(dying)}: "
            f"{self.replica(dying).health_reason}"
        )
        print(f"  counters: {moved}")
        self.finish(every)

    def dead_rank(self):
        """A rank dies behind a server that looks well, before anything is sent there."""
        engine = self.living()[-1]
        replica = next(r for r in self.replicas() if r.endpoint == engine.url)
        name, group = replica.replica_id, self.groups[engine.url]
        every = self.settle(4)
        dead, others = self.of(every, name, 1), self.of(every, name, 0)
        assert dead and others, self.places(every)
        wait_for(self.all_idle, "idle", 10)
        # Its own timestamp must have been seen since it became idle.
        time.sleep(3)
        os.kill(process_of(group, r"sglang::scheduler_DP1"), signal.SIGKILL)
        begun = time.monotonic()
        assert engine.looks_well(), "the server says that something is wrong"

        def routable(rank):
            return self.replica(name).ranks[rank].routable

        wait_for(lambda: not routable(1), "rank 1 out", self.frozen_after + SLACK_SECONDS)
        out = time.monotonic() - begun
        assert routable(0), "the other rank is out as well"
        assert engine.looks_well(), "the server says that something is wrong"
        homes = [(name, 0)]
        for other in self.replicas():
            if other.replica_id != name and self.health(other.replica_id) == "HEALTHY":
                homes += [(other.replica_id, 0), (other.replica_id, 1)]
        # It may come back: for as long as a lease its keys are served elsewhere and
        # belong there, then they move.
        away, detours = dead[0], 0
        while (reason := away.turn(guest=True)) == "DETOUR":
            detours += 1
            assert away.place in homes, away.turns
            if detours == 1:
                detour = time.monotonic() - begun
            waited = time.monotonic() - begun
            assert waited < out + LEASE_SECONDS + SLACK_SECONDS, "the key does not move"
            time.sleep(1)
        assert detours and reason == "REPLICA_LOST", away.turns
        assert away.place in homes, away.turns
        self.stay([away])
        self.move(dead[1:], "REPLICA_LOST", homes)
        moved = time.monotonic() - begun
        self.stay(others)
        print(
            f"  rank 1's scheduler killed: /ready stays 200; out of routing after "
            f"{out:.1f} s (frozen-after {self.frozen_after:g} s), before anything was "
            f"sent there; a turn elsewhere after {detour:.1f} s, {detours} such in all; its "
            f"{len(dead)} trajectories moved within {moved:.1f} s; the {len(others)} of "
            f"rank 0 stayed"
        )
        os.kill(process_of(group, r"sglang::scheduler_DP0"), signal.SIGKILL)
        begun = time.monotonic()
        wait_for(
            lambda: self.health(name) in ("UNHEALTHY", "DEAD"),
            "the replica out",
            self.frozen_after + SLACK_SECONDS,
        )
        out = time.monotonic() - begun
        assert engine.looks_well(), "the server says that something is wrong"
        replica = self.replica(name)
        assert not any(rank.routable for rank in replica.ranks)
        assert sum(rank.in_flight for rank in replica.ranks) == 0
        print(
            f"  rank 0's as well: /ready stays 200; the replica is "
            f"{self.health(name)} after {out:.1f} s: {replica.health_reason}"
        )
        if len(homes) > 1:
            self.move(others, "REPLICA_LOST", homes[1:])
            return
        begun = time.monotonic()
        try:
            others[0].turn()
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE, error
            print(
                f"  a turn is refused in {(time.monotonic() - begun) * 1e3:.0f} ms: "
                f"{error.details()}"
            )
        else:
            raise AssertionError("a turn was served by nobody")

    def all_idle(self):
        return all(sum(engine.busy().values()) == 0 for engine in self.living())


def main(address, binary, kind, frozen_after, servers):
    groups = {}
    for server in servers:
        url, _, group = server.rpartition("=")
        groups[url] = int(group)
    with Faults(address, binary, kind, float(frozen_after), groups) as faults:
        faults.all_here()
        checks = []
        if len(servers) > 1:
            checks += [faults.drain, faults.kill]
        else:
            print("left out, for they take two servers: drain, kill")
        if kind == "sglang":
            checks.append(faults.dead_rank)
        return run_checks(checks)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:5], sys.argv[5:]))

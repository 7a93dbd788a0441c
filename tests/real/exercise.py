"""What the ablation does not show of a real engine behind Berth: the facts that
it was registered with, refusals, trajectories turn by turn, streams, log
probabilities, a replay, aborts, new weights, and callers that leave. Needs an engine
that nobody else uses.

    exercise.py CONTROL_PLANE KIND ENGINE_URL...
"""

import math
import sys
import time
import uuid

import grpc

from real import DEADLINE, VOCABULARY, Berth, Trajectory, run_checks, wait_for

# How soon a rank must be idle after its caller has left.
IDLE_SECONDS = 1.0


class Exercise(Berth):
    """The checks; each leaves the engines idle."""

    def facts(self):
        """A sidecar registers what the engine is."""
        self.all_here()
        for replica in self.replicas():
            self.engine_of(replica.replica_id).facts(replica)
            assert replica.vocab_size == VOCABULARY
            assert replica.context_length == self.engine.context
            assert replica.page_size == self.engine.page
            can = replica.capabilities
            assert not can.tokenizer and not can.structured_output
            assert can.output_logprobs and can.prompt_logprobs
            assert [r.rank for r in replica.ranks] == [0, 1]
            for rank in replica.ranks:
                assert rank.weight_version == "default"
                assert rank.routable and rank.reported.healthy
            print(
                f"  {replica.replica_id}: {self.engine.kind} {replica.engine_version}, 2 "
                f"ranks of {replica.ranks[0].kv_capacity_tokens} tokens, incremental "
                f"{can.incremental_streaming}, seed {can.seed}"
            )

    def trajectories(self):
        """Each turn on its trajectory's rank, with the tokens cached as foreseen."""
        count = 2 * self.ranks()
        every = [Trajectory(self, 400 + 90 * i) for i in range(count)]
        for turn in range(4):
            for trajectory in every:
                before = trajectory.place
                counted = self.count(before)
                reason = trajectory.turn(24)
                assert reason == ("PINNED" if turn else "NEW_KEY"), trajectory.turns
                if turn:
                    assert trajectory.place == before, trajectory.turns
                self.counted(before, counted, trajectory)
        used = {t.place for t in every}
        assert len(used) == self.ranks(), used
        for trajectory in every:
            turns = " ".join(
                f"{cached}/{expected} of {prompt}"
                for _, _, _, cached, expected, prompt in trajectory.turns
            )
            replica, rank = trajectory.place
            print(f"  {replica}:{rank} cached/foreseen of prompt by turn: {turns}")
        warm = [t for trajectory in every for t in trajectory.turns[1:]]
        print(
            f"  {len(warm)} warm turns on {len(used)} ranks, all on the rank of the "
            f"turn before by the {self.said_by()}, "
            f"{sum(t[3] for t in warm)} of {sum(t[4] for t in warm)} tokens foreseen "
            f"were cached"
        )

    def said_by(self):
        if self.engine.tells_rank:
            return "engine's word in each reply"
        return "engine's own count of prompt tokens by rank"

    def count(self, place):
        """What the engine has counted so far, where its replies do not tell."""
        if self.engine.tells_rank or place is None:
            return None
        return self.engine_of(place[0]).prompt_tokens()

    def counted(self, place, before, trajectory):
        """The turn's prompt must be found at that rank, and at no other."""
        if before is None:
            return
        engine, rank = self.engine_of(place[0]), place[1]
        prompt = trajectory.turns[-1][5]
        want = {r: n + (prompt if r == rank else 0) for r, n in before.items()}
        try:
            # It counts after it has replied.
            wait_for(lambda: engine.prompt_tokens() == want, "counts", 5)
        except AssertionError:
            raise AssertionError(
                f"{place}: {before} and {prompt} more became {engine.prompt_tokens()}"
            ) from None

    def refusal(self):
        """An id outside the vocabulary ends an engine: it must not get there."""
        for bad in (VOCABULARY, 2**32 - 1):
            try:
                self.sample([1, bad, 3], 4)
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
                assert "vocabulary" in error.details().lower(), error.details()
            else:
                raise AssertionError(f"token id {bad} was taken")
        self.alive()

    def alive(self):
        """Every rank of every engine still generates."""
        turns = self.pb.ROUTING_POLICY_ROUND_ROBIN
        self.round_robin(lambda: self.sample(self.ids(20), 2, routing_policy=turns))

    def round_robin(self, call, by_rank=True):
        """Asks until every rank, or every engine, has answered."""
        wanted = self.ranks() if by_rank else len(self.engines)
        seen = set()
        for _ in range(4 * self.ranks()):
            response = call()
            route = response.samples[0].route
            if self.engine.tells_rank:
                assert route.HasField("served_rank"), route
                assert route.served_rank == route.rank, route
            seen.add((route.replica_id, route.rank if by_rank else None))
            if len(seen) == wanted:
                return
        raise AssertionError(f"only {sorted(seen)} answered")

    def stream(self):
        """The deltas are the final message, from engines of either kind."""
        incremental = {
            r.replica_id: r.capabilities.incremental_streaming for r in self.replicas()
        }
        said = set()

        def once():
            prompt = self.ids(200)
            request = self.request(
                prompt,
                200,
                logprobs=self.pb.Logprobs(output=True),
                routing_policy=self.pb.ROUTING_POLICY_ROUND_ROBIN,
            )
            events = list(self.sampling.SampleStream(request, timeout=DEADLINE))
            kinds = [e.WhichOneof("event") for e in events]
            assert kinds[0] == "started" and kinds[-1] == "final", kinds
            assert kinds.count("final") == 1 and "reset" not in kinds
            tokens, logprobs, deltas = [], [], 0
            for event in events:
                if event.WhichOneof("event") == "delta":
                    assert event.delta.offset == len(tokens)
                    tokens.extend(event.delta.token_ids)
                    logprobs.extend(event.delta.logprobs)
                    deltas += 1
            final = events[-1].final
            sample = final.samples[0]
            assert list(sample.token_ids) == tokens and len(tokens) == 200
            assert list(sample.logprobs) == logprobs and len(logprobs) == 200
            assert all(math.isfinite(x) and x <= 0 for x in logprobs)
            assert [(s.version, s.start, s.end) for s in sample.weight_spans] == [
                ("default", 0, 200)
            ]
            replica = sample.route.replica_id
            if incremental[replica]:
                assert deltas > 6, deltas
            else:
                # Each frame repeats all before it: few of them.
                assert 2 <= deltas <= 6, deltas
            if replica not in said:
                said.add(replica)
                first = final.timing.first_token.ToTimedelta().total_seconds()
                total = final.timing.total.ToTimedelta().total_seconds()
                print(
                    f"  {replica}: 200 tokens in {deltas} deltas, first after "
                    f"{first * 1e3:.0f} of {total * 1e3:.0f} ms"
                )
            return final

        self.round_robin(once)

    def logprobs(self):
        """Log probabilities of output and prompt agree with each other."""
        prompt = self.ids(50)
        wanted = self.pb.Logprobs(output=True, top_k=3, prompt=True, prompt_top_k=2)
        worst = 0.0
        for _ in range(self.ranks()):
            first = self.sample(
                prompt,
                10,
                logprobs=wanted,
                routing_policy=self.pb.ROUTING_POLICY_ROUND_ROBIN,
            )
            sample = first.samples[0]
            assert first.logprob_mode == self.pb.LOGPROB_MODE_PROCESSED
            assert len(sample.logprobs) == 10
            top = sample.top_logprobs
            assert top.stride == 3 and len(top.token_ids) == len(top.logprobs) == 30
            # Greedy: the most likely is the one that was taken.
            for at in range(10):
                best = top.logprobs[3 * at]
                assert abs(best - sample.logprobs[at]) < 1e-4
                assert list(top.logprobs[3 * at : 3 * at + 3]) == sorted(
                    top.logprobs[3 * at : 3 * at + 3], reverse=True
                )
            assert self.prompt_is_whole(first, len(prompt))
            # The output, given as a prompt, has the same ones, but for rounding.
            again = self.sample(
                prompt + list(sample.token_ids),
                1,
                logprobs=self.pb.Logprobs(prompt=True),
            )
            assert again.samples[0].usage.cached_tokens == 0
            off = [
                abs(a - b)
                for a, b in zip(
                    sample.logprobs, again.prompt_logprobs.logprobs[-10:], strict=True
                )
            ]
            worst = max(worst, *off)
            assert worst < 0.2, off
        print(f"  decoded against prefilled: at most {worst:.2e} apart")

    @staticmethod
    def prompt_is_whole(response, length):
        of_prompt = response.prompt_logprobs
        assert len(of_prompt.logprobs) == length
        assert math.isnan(of_prompt.logprobs[0])
        assert all(math.isfinite(x) and x <= 0 for x in of_prompt.logprobs[1:])
        assert of_prompt.top_logprobs.stride == 2
        assert len(of_prompt.top_logprobs.token_ids) == 2 * length
        assert response.samples[0].usage.cached_tokens == 0
        return True

    def fan_out(self):
        """Samples of one request, a replay of it, and a key used again."""
        key = f"real-{uuid.uuid4()}"
        request = self.request(self.ids(60), 8, num_samples=4, idempotency_key=key)
        first = self.sampling.Sample(request, timeout=DEADLINE)
        assert [len(s.token_ids) for s in first.samples] == [8] * 4
        assert not first.replayed
        again = self.sampling.Sample(request, timeout=DEADLINE)
        assert again.replayed and list(again.samples) == list(first.samples)

    def longest(self):
        """Tokens that take long to generate, and have room after a short prompt."""
        return min(20_000, self.engine.context - 1_000)

    def start_long(self, max_tokens=None, **fields):
        """A generation that takes long, and is running."""
        wait_for(self.idle, "the engines are idle", 10)
        request = self.request(self.ids(100), max_tokens or self.longest(), **fields)
        call = self.sampling.Sample.future(request, timeout=DEADLINE)
        wait_for(lambda: not self.idle(), "the generation runs", 30)
        return call

    def stops(self):
        """A token id that ends a generation is named."""

        def once():
            request = self.request(
                self.ids(30), 8, routing_policy=self.pb.ROUTING_POLICY_ROUND_ROBIN
            )
            request.sampling.ignore_eos = False
            request.sampling.stop_token_ids.ids.append(77)
            request.sampling.logit_bias[77] = 100.0
            response = self.sampling.Sample(request, timeout=DEADLINE)
            sample = response.samples[0]
            assert list(sample.token_ids) == [77]
            assert sample.stop_reason == self.pb.STOP_REASON_STOP
            assert sample.matched_token_id == 77
            return response

        self.round_robin(once)
        # With ignore_eos SGLang would not stop at it, and say nothing.
        request = self.request(self.ids(30), 8)
        request.sampling.stop_token_ids.ids.append(77)
        request.sampling.logit_bias[77] = 100.0
        try:
            response = self.sampling.Sample(request, timeout=DEADLINE)
        except grpc.RpcError as error:
            assert self.engine.kind == "sglang", error
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION, error
        else:
            assert self.engine.kind == "vllm", "stop_token_ids with ignore_eos was taken"
            assert list(response.samples[0].token_ids) == [77]

    def cut_short(self, on_abort):
        """A generation of 400 tokens that its engine aborts midway."""
        call = self.start_long(
            400,
            on_abort=on_abort,
            logprobs=self.pb.Logprobs(output=True),
            routing_policy=self.pb.ROUTING_POLICY_ROUND_ROBIN,
        )
        time.sleep(0.5)
        for engine in self.engines:
            engine.abort_all()
        response = call.result()
        sample = response.samples[0]
        assert len(sample.logprobs) == len(sample.token_ids)
        return response

    def engine_abort(self):
        """What an engine ends early goes on, or is returned, as asked."""

        def goes_on():
            response = self.cut_short(self.pb.ON_ABORT_CONTINUE)
            sample = response.samples[0]
            assert len(sample.token_ids) == 400
            first, *others = sample.route.attempts
            assert first.failure == self.pb.ATTEMPT_FAILURE_ABORTED
            assert 0 < first.kept_tokens < 400
            assert first.kept_tokens + sum(a.kept_tokens for a in others) == 400
            kept.append(first.kept_tokens)
            return response

        kept = []

        def partial():
            response = self.cut_short(self.pb.ON_ABORT_RETURN_PARTIAL)
            sample = response.samples[0]
            assert 0 < len(sample.token_ids) < 400
            assert sample.stop_reason == self.pb.STOP_REASON_ABORTED
            return response

        # What goes on does so on the next rank, so that only every other one is
        # the last of a request.
        self.round_robin(goes_on, by_rank=False)
        self.round_robin(partial)
        print(f"  went on after so many of 400 tokens: {kept}")

    def weight_sync(self):
        """New weights midway: spans say which token is of which."""

        def sync(version):
            for engine in self.engines:
                engine.set_version(version)

        def once():
            call = self.start_long(
                400, routing_policy=self.pb.ROUTING_POLICY_ROUND_ROBIN
            )
            time.sleep(0.5)
            sync("7")
            response = call.result()
            sync("default")
            one, two = response.samples[0].weight_spans
            assert (one.version, one.start) == ("default", 0)
            assert (two.version, two.end) == ("7", 400)
            assert 0 < one.end == two.start
            switched.append(one.end)
            return response

        switched = []
        self.round_robin(once)
        print(f"  of 400 tokens by the old weights, rank by rank: {switched}")

    def cancel(self):
        """A caller that leaves: its engine is idle at once."""
        call = self.start_long()
        call.cancel()
        left = wait_for(self.idle, "idle after the caller left", IDLE_SECONDS)

        key = f"real-{uuid.uuid4()}"
        call = self.start_long(idempotency_key=key)
        told = self.sampling.CancelSample(
            self.pb.CancelSampleRequest(idempotency_key=key), timeout=DEADLINE
        )
        by_key = wait_for(self.idle, "idle after CancelSample", IDLE_SECONDS)
        assert told.attempts_aborted == 1
        assert call.code() == grpc.StatusCode.CANCELLED, call.code()

        request = self.request(self.ids(100), self.longest())
        call = self.sampling.Sample.future(request, timeout=2)
        assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED, call.code()
        late = wait_for(self.idle, "idle after the deadline", IDLE_SECONDS)
        print(
            f"  idle {left * 1e3:.0f} ms after the caller left, {by_key * 1e3:.0f} ms "
            f"after CancelSample, {late * 1e3:.0f} ms after a deadline"
        )


def main(control_plane, kind, engines):
    with Exercise(control_plane, kind, engines) as exercise:
        return run_checks(
            [
                exercise.facts,
                exercise.refusal,
                exercise.trajectories,
                exercise.stream,
                exercise.logprobs,
                exercise.fan_out,
                exercise.stops,
                exercise.engine_abort,
                exercise.weight_sync,
                exercise.cancel,
                exercise.alive,
            ]
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))

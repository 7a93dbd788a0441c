// An engine dies midway: one generation, one result. No test here calls again
// after an error, unless it says so: gRPC does, by its retry policy.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { test } from "node:test";

import { Cluster, waitFor } from "./cluster.js";
import { refused, request, status, Trainer } from "./trainer.js";

const TOKENS = 64;
// Steps of 0.4 ms.
const ENGINES = [
  ...["--profile", "h100", "--time-scale", "0.05"],
  ...["--context-length", "131072"],
];
// A step of 0.4 s instead: it does not end before it is interrupted.
const SLOW = 1000;
// The longest that two copies may run at once where both engines can be reached.
const FENCE_SECONDS = 1;

const LOST = [1, "ATTEMPT_FAILURE_LOST"];
const SECOND = [2, null];

// A trajectory after its first turn, at a home that is slow from now on.
class Trajectory {
  static async begin(cluster, trainer, promptTokens = 600) {
    const self = new Trajectory();
    self.cluster = cluster;
    await trainer.healthy(cluster.engines.size);
    const key = randomUUID();
    let prompt = Array.from({ length: promptTokens }, (_, i) => i);
    const first = await trainer.sample(packed(prompt, 8, { cache_affinity_key: key }));
    self.home = cluster.engines.get(first.samples[0].route.replica_id);
    prompt = prompt.concat(first.samples[0].token_ids);
    // What the model says, whoever runs it: every token of a simulated engine is
    // a function of the tokens before it.
    const reference = await trainer.sample(packed(prompt, TOKENS));
    self.expected = reference.samples[0].token_ids;
    self.turn = packed(prompt, TOKENS, { cache_affinity_key: key, idempotency_key: key });
    self.promptTokens = prompt.length;
    self.begun = Date.now() / 1000;
    await self.home.faults({ slow: SLOW });
    return self;
  }

  // The copies of the turn that an engine has seen in this start, or all have.
  async copies(engines = [...this.cluster.engines.values()]) {
    const all = await Promise.all(engines.map((e) => e.history()));
    return all
      .flat()
      .filter((e) => e.prompt_tokens === this.promptTokens && e.arrived >= this.begun);
  }

  // Gives a moment at which the home still lived.
  async homeDies({ restart = false } = {}) {
    const [copy] = await waitFor(async () => {
      const started = (await this.copies([this.home])).filter((c) => c.started !== null);
      return started.length > 0 && started;
    }, "the turn runs at the trajectory's home");
    assert.equal(copy.how, "live");
    assert.deepEqual(await this.copies(), [copy]);
    const alive = Date.now() / 1000;
    await this.home.die();
    if (restart) await this.home.restart();
    else this.cluster.engines.delete(this.home.replicaId);
    return alive;
  }

  // One result, and one copy since the death.
  async finishedOnce(response, alive) {
    assert.equal(response.samples.length, 1);
    assert.deepEqual(response.samples[0].token_ids, this.expected);
    assert.equal(response.samples[0].token_ids.length, TOKENS);
    assert.equal(response.replayed, false);
    const copies = await this.copies();
    assert.deepEqual(copies.map((c) => [c.how, c.tokens]), [["length", TOKENS]]);
    assert.ok(copies[0].started >= alive);
  }

  // A second call is answered alike and asks no engine.
  async replays(trainer, response) {
    const copies = await this.copies();
    const again = await trainer.sample(this.turn);
    assert.equal(again.replayed, true);
    assert.deepEqual(again.samples, response.samples);
    assert.deepEqual(await this.copies(), copies);
  }
}

function packed(prompt, tokens, fields) {
  const { token_ids: _, ...rest } = request(prompt, tokens, fields);
  return { ...rest, token_ids_le: Buffer.from(Uint32Array.from(prompt).buffer) };
}

// Number and failure of each attempt in the receipt.
function attempts({ samples: [sample] }) {
  return sample.route.attempts.map((a) => [a.number, a._failure ? a.failure : null]);
}

// Rejections are looked at later.
function begun(call) {
  call.catch(() => {});
  return call;
}

// Where Berth makes the second attempt itself, both are in one receipt. Where the
// client had to ask again, the receipt has the second one only.
for (const { name, receipt, ...how } of [
  { name: "Berth retries", receipt: [LOST, SECOND] },
  { name: "the client retries", serve: ["--max-attempts", "1"], receipt: [SECOND] },
  {
    name: "the client retries with a long prompt",
    serve: ["--max-attempts", "1"],
    promptTokens: 70_000,
    receipt: [SECOND],
  },
  {
    // Beats and restart must fit into the policy's backoffs, 6 s at least.
    name: "the client retries until the engine is back",
    serve: ["--heartbeat-interval", "500ms"],
    engines: 1,
    receipt: [SECOND],
  },
]) {
  test(`an engine dies midway: ${name}`, async (t) => {
    const cluster = await Cluster.start(t, { ...how, engine: ENGINES });
    const trainer = new Trainer(t, cluster.target);
    const trajectory = await Trajectory.begin(cluster, trainer, how.promptTokens);
    const call = begun(trainer.sample(trajectory.turn));
    const alive = await trajectory.homeDies({ restart: how.engines === 1 });
    const response = await call;
    await trajectory.finishedOnce(response, alive);
    assert.deepEqual(attempts(response), receipt);
    await trajectory.replays(trainer, response);
    cluster.check();
  });
}

test("without a retry policy the loss is told and a retry by hand finishes", async (t) => {
  const cluster = await Cluster.start(t, { serve: ["--max-attempts", "1"], engine: ENGINES });
  const trainer = new Trainer(t, cluster.target, { retries: false });
  const trajectory = await Trajectory.begin(cluster, trainer);
  const call = begun(trainer.sample(trajectory.turn));
  const alive = await trajectory.homeDies();
  const { RetryInfo } = await refused(call, status.UNAVAILABLE, "REPLICA_LOST");
  const wait = RetryInfo.retry_delay.seconds + RetryInfo.retry_delay.nanos / 1e9;
  assert.ok(wait > 0 && wait <= 10, `${wait} s`);
  const response = await trainer.sample(trajectory.turn);
  await trajectory.finishedOnce(response, alive);
  await trajectory.replays(trainer, response);
  cluster.check();
});

test("a connection breaks and the copy behind it is stopped", async (t) => {
  const cluster = await Cluster.start(t, { serve: ["--max-attempts", "1"], engine: ENGINES });
  const trainer = new Trainer(t, cluster.target);
  const trajectory = await Trajectory.begin(cluster, trainer);
  await trajectory.home.faults({
    drop_stream: { times: { next: 1 }, after_tokens: 3 },
    slow: SLOW,
  });
  const call = begun(trainer.sample(trajectory.turn));
  await waitFor(
    async () => (await trajectory.copies()).some((c) => c.how !== "live"),
    "the copy is stopped by its id",
  );
  await trajectory.home.faults({ slow: 1 });
  const response = await call;
  assert.deepEqual(response.samples[0].token_ids, trajectory.expected);
  assert.deepEqual(attempts(response), [SECOND]);
  const copies = await trajectory.copies();
  const [lost, finished, ...more] = copies.sort((a, b) => a.arrived - b.arrived);
  assert.deepEqual([lost.how, finished.how, more.length], ["aborted", "length", 0]);
  assert.ok(finished.started >= lost.ended - FENCE_SECONDS);
  await trajectory.replays(trainer, response);
  cluster.check();
});

test("a stream takes back what a dead engine said", async (t) => {
  const cluster = await Cluster.start(t, { engine: ENGINES });
  const trainer = new Trainer(t, cluster.target);
  const trajectory = await Trajectory.begin(cluster, trainer);
  let alive;
  const { held, final, kinds } = await trainer.follow(trajectory.turn, async (event) => {
    if (event === "delta") alive ??= await trajectory.homeDies();
  });
  assert.equal(kinds.filter((k) => k === "reset").length, 1);
  assert.deepEqual(held, [trajectory.expected]);
  await trajectory.finishedOnce(final, alive);
  await trajectory.replays(trainer, final);
  cluster.check();
});

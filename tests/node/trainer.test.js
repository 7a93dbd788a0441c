// What a trainer in Node relies on.

import assert from "node:assert/strict";
import { randomInt, randomUUID } from "node:crypto";
import { test } from "node:test";

import { Cluster, waitFor } from "./cluster.js";
import { refused, request, status, Trainer } from "./trainer.js";

// A step of 0.8 ms: long enough to be interrupted, short enough to wait for.
const ENGINES = ["--profile", "h100", "--time-scale", "0.1"];

// Random ids, so that no cache knows them.
const newPrompt = (length = 600) => Array.from({ length }, () => randomInt(150_000));

test("a trainer", async (t) => {
  const cluster = await Cluster.start(t, { engine: ENGINES });
  const trainer = new Trainer(t, cluster.target);
  const replicas = await trainer.healthy(2);
  const entries = async (promptTokens) => {
    const all = await Promise.all([...cluster.engines.values()].map((e) => e.history()));
    return all.flat().filter((e) => e.prompt_tokens === promptTokens);
  };

  await t.test("the second turn of a trajectory is cached on the same rank", async () => {
    const key = randomUUID();
    const prompt = newPrompt();
    const first = await trainer.sample(request(prompt, 32, { cache_affinity_key: key }));
    const [one] = first.samples;
    assert.equal(one.token_ids.length, 32);
    assert.equal(one.stop_reason, "STOP_REASON_LENGTH");
    assert.deepEqual(one.usage, { prompt_tokens: 600, cached_tokens: 0, completion_tokens: 32 });
    assert.equal(one.route.reason, "ROUTE_REASON_NEW_KEY");

    const history = [...prompt, ...one.token_ids];
    const more = [...history, ...prompt.slice(0, 5)];
    const second = await trainer.sample(request(more, 32, { cache_affinity_key: key }));
    const [two] = second.samples;
    assert.equal(two.route.reason, "ROUTE_REASON_PINNED");
    for (const field of ["replica_id", "incarnation", "rank"]) {
      assert.equal(two.route[field], one.route[field], field);
    }
    // All of the history but its last token, which was never computed, in whole
    // pages.
    const { page_size: page } = replicas.find((r) => r.replica_id === two.route.replica_id);
    const cached = Math.floor((history.length - 1) / page) * page;
    assert.equal(two.usage.cached_tokens, cached);
    assert.equal(two.route.expected_cached_tokens, cached);

    assert.equal((await trainer.finishTrajectory(key)).unpinned, true);
    assert.equal((await trainer.finishTrajectory(key)).unpinned, false);
  });

  await t.test("all violations of a bad request come at once", async () => {
    const key = randomUUID();
    const bad = request(newPrompt(), 32, {
      idempotency_key: key,
      cache_affinity_key: "  ",
      num_samples: 0,
    });
    Object.assign(bad.sampling, { top_p: 2, temperature: -1 });
    const details = await refused(
      trainer.sample(bad),
      status.INVALID_ARGUMENT,
      "INVALID_REQUEST",
    );
    const violations = details.BadRequest.field_violations;
    assert.deepEqual(violations.map((v) => v.field).sort(), [
      "cache_affinity_key",
      "num_samples",
      "sampling.temperature",
      "sampling.top_p",
    ]);
    assert.ok(violations.every((v) => v.description));

    // It was not kept under its key: the same key serves once it is right.
    const fixed = request(newPrompt(), 32, { idempotency_key: key });
    assert.equal((await trainer.sample(fixed)).replayed, false);
    fixed.sampling.max_tokens = 33;
    await refused(trainer.sample(fixed), status.ALREADY_EXISTS, "IDEMPOTENCY_KEY_REUSED");
  });

  await t.test("the deltas of a stream add up to its final message", async () => {
    const asked = request(newPrompt(), 32, { idempotency_key: randomUUID(), num_samples: 2 });
    const { held, final, kinds } = await trainer.follow(asked);
    assert.ok(kinds.includes("delta"));
    assert.deepEqual(final.samples.map((s) => s.index), [0, 1]);
    assert.deepEqual(held, final.samples.map((s) => s.token_ids));
    assert.ok(held.every((tokens) => tokens.length === 32));

    // The unary call and a second stream of this key give the same result.
    const unary = await trainer.sample(asked);
    assert.equal(unary.replayed, true);
    assert.deepEqual(unary.samples, final.samples);
    const again = await trainer.follow(asked);
    assert.equal(again.final.replayed, true);
    assert.deepEqual(again.held, held);
    assert.deepEqual(again.final.samples, final.samples);
  });

  await t.test("a deadline ends the call and the generation", async () => {
    const late = trainer.sample(request(newPrompt(601), 8000), 500);
    await assert.rejects(late, { code: status.DEADLINE_EXCEEDED });
    await waitFor(async () => {
      const found = await entries(601);
      return found.length > 0 && found.every((e) => e.how === "aborted");
    }, "the engine stops, since nobody can come back for it");
  });

  await t.test("a retry after a deadline joins what was begun", async () => {
    const asked = request(newPrompt(599), 2000, { idempotency_key: randomUUID() });
    await assert.rejects(trainer.sample(asked, 500), { code: status.DEADLINE_EXCEEDED });
    const { samples } = await trainer.sample(asked);
    assert.equal(samples[0].token_ids.length, 2000);
    const found = await entries(599);
    assert.deepEqual(found.map((e) => [e.how, e.tokens]), [["length", 2000]]);
  });

  cluster.check();
});

// A client of stock gRPC: channel, calls, errors and streams.

import assert from "node:assert/strict";
import fs from "node:fs";
import path from "node:path";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import protobuf from "protobufjs";

import { MODEL, ROOT, waitFor } from "./cluster.js";

export const { status } = grpc;
const PROTO = path.join(ROOT, "proto");
const SERVICE_CONFIG = path.join(PROTO, "berth", "v1", "service_config.json");
const DEADLINE_MS = 60_000;

const definition = protoLoader.loadSync(
  ["berth/v1/sampling.proto", "berth/v1/fleet.proto"],
  {
    includeDirs: [PROTO],
    keepCase: true,
    enums: String,
    longs: Number,
    defaults: true,
    oneofs: true,
  },
);
const api = grpc.loadPackageDefinition(definition).berth.v1;

// What of google.rpc is read here.
const rpc = protobuf.parse(`
  syntax = "proto3";
  package google.rpc;
  message Packed { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Packed details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; }
  message Violation { string field = 1; string description = 2; }
  message BadRequest { repeated Violation field_violations = 1; }
  message Wait { int64 seconds = 1; int32 nanos = 2; }
  message RetryInfo { Wait retry_delay = 1; }
`, { keepCase: true }).root;

// A client with the retry policy beside the proto, carried out by gRPC itself,
// or with none.
export class Trainer {
  constructor(t, target, { retries = true } = {}) {
    const options = {
      // The environment's proxies do not lead to this machine.
      "grpc.enable_http_proxy": 0,
      "grpc.service_config_disable_resolution": 1,
      // A longer request is not kept for a retry.
      "grpc.per_rpc_retry_buffer_size": 16 << 20,
      ...(retries
        ? { "grpc.service_config": fs.readFileSync(SERVICE_CONFIG, "utf8") }
        : { "grpc.enable_retries": 0 }),
    };
    const insecure = grpc.credentials.createInsecure();
    this.sampling = new api.SamplingService(target, insecure, options);
    this.fleet = new api.FleetService(target, insecure, options);
    t.after(() => {
      this.sampling.close();
      this.fleet.close();
    });
  }

  sample(request, ms = DEADLINE_MS) {
    return unary(this.sampling, "Sample", request, ms);
  }

  finishTrajectory(key) {
    return unary(this.sampling, "FinishTrajectory", { model: MODEL, cache_affinity_key: key });
  }

  // Obeys the events of a stream; gives what it held for each sample before the
  // final message, that message, and the kinds of events in order.
  async follow(request, watch = async () => {}) {
    const stream = this.sampling.SampleStream(request, { deadline: Date.now() + DEADLINE_MS });
    const held = [];
    const kinds = [];
    let final;
    for await (const { event, ...of } of stream) {
      assert.equal(final, undefined, "nothing follows the final message");
      kinds.push(event);
      if (event === "delta") {
        const { sample, offset, token_ids: tokens } = of.delta;
        held[sample] ??= [];
        assert.equal(offset, held[sample].length);
        held[sample].push(...tokens);
      } else if (event === "reset") {
        held[of.reset.sample].length = of.reset.keep;
      } else if (event === "final") {
        final = of.final;
      }
      await watch(event);
    }
    assert.equal(kinds.indexOf("started"), 0);
    assert.equal(kinds.lastIndexOf("started"), 0);
    assert.ok(final, "the stream ended without its final message");
    return { held, final, kinds };
  }

  // Waits for so many healthy replicas and gives them.
  healthy(wanted) {
    return waitFor(async () => {
      const { replicas } = await unary(this.fleet, "ListReplicas", {}, 10_000);
      const found = replicas.filter((r) => r.health === "REPLICA_HEALTH_HEALTHY");
      return found.length >= wanted && found;
    }, `${wanted} healthy replicas`);
  }
}

function unary(client, method, request, ms = DEADLINE_MS) {
  return new Promise((resolve, reject) => {
    client[method](request, { deadline: Date.now() + ms }, (error, response) =>
      error ? reject(error) : resolve(response),
    );
  });
}

// A request for so many tokens past any end of sequence.
export function request(prompt, tokens, fields = {}) {
  return {
    model: MODEL,
    token_ids: { ids: prompt },
    sampling: { max_tokens: tokens, ignore_eos: true },
    ...fields,
  };
}

// Expects an error with this code and this reason; gives its google.rpc details
// by name.
export async function refused(call, code, reason) {
  const error = await call.then(
    () => assert.fail("it was not refused"),
    (error) => error,
  );
  assert.equal(error.code, code, `${error}`);
  const [bytes] = error.metadata.get("grpc-status-details-bin");
  assert.ok(bytes, `no details: ${error}`);
  const found = {};
  for (const { type_url: url, value } of decode("Status", bytes).details) {
    const name = url.split("/google.rpc.")[1];
    found[name] = decode(name, value);
  }
  assert.equal(found.ErrorInfo.domain, "berth.dev");
  assert.equal(found.ErrorInfo.reason, reason);
  return found;
}

function decode(name, bytes) {
  const type = rpc.lookupType(`google.rpc.${name}`);
  return type.toObject(type.decode(bytes), { longs: Number, defaults: true });
}

// A control plane with simulated engines, as processes of their own.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { randomInt } from "node:crypto";
import fs from "node:fs";
import http from "node:http";
import net from "node:net";
import os from "node:os";
import path from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

export const ROOT = fileURLToPath(new URL("../..", import.meta.url));
export const MODEL = "sim-model";
const START_MS = 60_000;
const STOP_MS = 15_000;

// A process that ended while it was waited for.
class Died extends Error {}

// Gives what the condition gives as soon as that is true.
export async function waitFor(condition, what, child) {
  const end = Date.now() + START_MS;
  for (;;) {
    // The process first: another one may answer on the port of a dead one.
    if (child?.ended) throw new Died(`${what}: ended\n${child.tail()}`);
    const found = await condition();
    if (found) return found;
    const seen = child ? child.tail() : "";
    assert.ok(Date.now() < end, `${what}: not there after ${START_MS} ms\n${seen}`);
    await sleep(50);
  }
}

class Child {
  constructor(name, args, work) {
    this.name = name;
    this.log = path.join(work, `${name}-${randomInt(2 ** 32)}.log`);
    const out = fs.openSync(this.log, "w");
    // Without our own variables: the binary refuses those that it does not
    // know, and the others would change what is tested.
    const env = Object.entries(process.env).filter(([k]) => !k.startsWith("BERTH_"));
    this.process = spawn(binary(), args, {
      stdio: ["ignore", out, out],
      env: Object.fromEntries(env),
    });
    fs.closeSync(out);
    this.ended = false;
    this.end = new Promise((resolve) => {
      const over = () => {
        this.ended = true;
        resolve();
      };
      this.process.once("exit", over);
      this.process.once("error", over);
    });
  }

  tail() {
    return `${this.name}: ${fs.readFileSync(this.log, "utf8").slice(-4000)}`;
  }

  async stop() {
    if (this.ended) return;
    this.process.kill("SIGTERM");
    const patience = new AbortController();
    const late = sleep(STOP_MS, "late", { signal: patience.signal }).catch(() => {});
    if ((await Promise.race([this.end, late])) === "late") {
      this.process.kill("SIGKILL");
      await this.end;
    }
    patience.abort();
  }
}

function binary() {
  const given = process.env.BERTH_BIN ?? path.join(ROOT, "target", "debug", "berth");
  assert.ok(fs.existsSync(given), `${given} is missing: cargo build, or set BERTH_BIN`);
  return path.resolve(given);
}

// A port that nobody listens on, below the range that the kernel gives to
// outgoing connections, so that it is still free after a restart.
async function freePort() {
  for (let i = 0; i < 100; i++) {
    const port = randomInt(20_000, 32_000);
    const probe = net.createServer();
    const free = await new Promise((resolve) => {
      probe.once("error", () => resolve(false));
      probe.listen(port, "127.0.0.1", () => probe.close(() => resolve(true)));
    });
    if (free) return port;
  }
  throw new Error("no free port");
}

function accepts(port) {
  return new Promise((resolve) => {
    const socket = net.connect(port, "127.0.0.1");
    const is = (open) => {
      socket.destroy();
      resolve(open);
    };
    socket.once("connect", () => is(true));
    socket.once("error", () => is(false));
  });
}

// JSON over a connection of its own.
function ask(port, route, body) {
  return new Promise((resolve, reject) => {
    const options = { agent: false, host: "127.0.0.1", port, path: route };
    const request = http.request({ ...options, method: body ? "POST" : "GET" }, (reply) => {
      const parts = [];
      reply.on("data", (part) => parts.push(part));
      reply.on("error", reject);
      reply.on("end", () => {
        try {
          assert.equal(reply.statusCode, 200);
          resolve(JSON.parse(Buffer.concat(parts)));
        } catch (error) {
          reject(error);
        }
      });
    });
    request.on("error", reject);
    request.end(body ? JSON.stringify(body) : undefined);
  });
}

// A simulated engine, which lives on the same port after a restart.
class Engine {
  constructor(cluster, replicaId, flags) {
    this.cluster = cluster;
    this.replicaId = replicaId;
    this.flags = flags;
  }

  async start(ports) {
    const args = (port) => [
      "sim-engine",
      ...["--port", `${port}`, "--model", MODEL, "--incremental-streaming-output"],
      ...this.flags,
    ];
    const name = `engine-${this.replicaId}`;
    [this.child, this.port] = await this.cluster.startListening(name, args, ports);
  }

  // These from now on, and no others.
  faults(faults) {
    return ask(this.port, "/sim/faults", faults);
  }

  // Every connection is cut and the port refuses.
  async die() {
    // The reply may be cut as well.
    await ask(this.port, "/sim/faults", { die: true }).catch(() => {});
    await waitFor(() => this.child.ended, `${this.replicaId} ends`);
    this.cluster.forget(this.child);
  }

  // After its end, on the port that it had, with an empty cache.
  restart() {
    return this.start([this.port]);
  }

  // All its requests of this start, the oldest first.
  async history() {
    return (await ask(this.port, "/sim/history")).entries;
  }
}

// A control plane, its engines and a sidecar beside each of them.
export class Cluster {
  engines = new Map();
  #children = [];

  // Stopped at the end of the test `t`.
  static async start(t, { serve = [], engines = 2, engine = [] } = {}) {
    const cluster = new Cluster();
    cluster.work = fs.mkdtempSync(path.join(os.tmpdir(), "berth-node-"));
    t.after(() => cluster.#stop());
    const args = (port) => [
      "serve",
      ...["--listen", `127.0.0.1:${port}`, "--admin-listen", "127.0.0.1:0"],
      ...["--data-dir", path.join(cluster.work, `data-${port}`)],
      ...serve,
    ];
    const [, port] = await cluster.startListening("serve", args);
    cluster.target = `127.0.0.1:${port}`;
    for (let i = 0; i < engines; i++) {
      const one = new Engine(cluster, `sim-${i}`, engine);
      await one.start();
      cluster.engines.set(one.replicaId, one);
      cluster.#child(`sidecar-${one.replicaId}`, [
        "sidecar",
        ...["--control-plane", `http://${cluster.target}`],
        ...["--engine-url", `http://127.0.0.1:${one.port}`],
        ...["--replica-id", one.replicaId],
      ]);
    }
    return cluster;
  }

  #child(name, args) {
    const child = new Child(name, args, this.work);
    this.#children.push(child);
    return child;
  }

  // Starts args(port) and waits until the port accepts connections. Another
  // process may take the port between the choice and the start: then the next
  // one is tried.
  async startListening(name, args, ports) {
    for (let i = 0; i < (ports?.length ?? 5); i++) {
      const port = ports?.[i] ?? (await freePort());
      const child = this.#child(name, args(port));
      try {
        await waitFor(() => accepts(port), `${name} on port ${port}`, child);
        return [child, port];
      } catch (error) {
        this.forget(child);
        if (!(error instanceof Died && /in use/i.test(child.tail()))) throw error;
      }
    }
    throw new Error(`${name}: no free port`);
  }

  // This one is known to have ended.
  forget(child) {
    this.#children = this.#children.filter((c) => c !== child);
  }

  // Nothing ended that was not told to.
  check() {
    for (const child of this.#children) assert.ok(!child.ended, child.tail());
  }

  async #stop() {
    // The newest first: sidecars take their leave before the rest goes.
    for (const child of this.#children.reverse()) await child.stop();
    fs.rmSync(this.work, { recursive: true, force: true });
  }
}

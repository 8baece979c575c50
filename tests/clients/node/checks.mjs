// What the scripts share: the server's address, the list of checks, and the lines that the runner reads.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import path from "node:path";

export const URL_OF_SERVER = process.env.PENSTOCK_URL;
export const API = `${URL_OF_SERVER}/v1`;
export const MODEL = process.env.PENSTOCK_MODEL;
export const KEY = "none";
export const QUESTION = "What does a water turbine do?";
export const STORY = "Tell me a very long story about a river, with many chapters.";
export const LONG_STORY_TOKENS = 6000;
// More tokens than the context of the demo model, 8,192.
export const TOO_LONG = "water ".repeat(9000);
export const ASK_LENGTH = "How long is the Oder?";
export const ASK_RIVER = "Name a river.";
export const LENGTHS_KM = { Oder: 840, Elbe: 1094, Warta: 808 };
const CANCEL_TIMEOUT_MS = 30_000;

const checks = [];

// Registers a check. Its name states the behavior; it throws if the behavior differs.
export function check(name, run) {
  checks.push({ name, run });
}

// Runs the registered checks, and prints a line of JSON for the versions and for each check.
export async function main(...packages) {
  console.log(JSON.stringify({ versions: Object.fromEntries(packages.map((name) => [name, versionOf(name)])) }));
  let failed = false;
  for (const { name, run } of checks) {
    const started = performance.now();
    let problem = null;
    try {
      await run();
    } catch (error) {
      problem = String(error?.stack ?? error);
      failed = true;
    }
    const seconds = Math.round(performance.now() - started) / 1000;
    console.log(JSON.stringify({ check: name, seconds, problem }));
  }
  process.exit(failed ? 1 : 0);
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Waits until the job that was created last has ended, and fails if it ended otherwise than by its cancellation.
export async function waitUntilNewestJobIsCancelled() {
  const until = performance.now() + CANCEL_TIMEOUT_MS;
  let state;
  while (["queued", "running"].includes((state = (await newestJob()).state))) {
    assert(performance.now() < until, `the job is still ${state}`);
    await sleep(100);
  }
  assert.equal(state, "cancelled");
}

async function newestJob() {
  return (await (await fetch(`${API}/jobs?limit=1`)).json()).data[0];
}

function versionOf(name) {
  const require = createRequire(path.join(process.cwd(), "package.json"));
  for (const folder of require.resolve.paths(name)) {
    try {
      return JSON.parse(readFileSync(path.join(folder, name, "package.json"), "utf8")).version;
    } catch {
      continue;
    }
  }
  throw new Error(`${name} is not installed`);
}

// What the scripts of agents share: prompts that tell the scripted model what to say, a folder, and a run of a program.

import { spawn } from "node:child_process";
import { mkdtemp, mkdir, readFile, rm } from "node:fs/promises";
import os from "node:os";
import path from "node:path";

const TIMEOUT_MS = 120_000;

export const call = (name, args) => `<tool_call>\n${JSON.stringify({ name, arguments: args })}\n</tool_call>`;
export const script = (...answers) => `SCRIPT: ${JSON.stringify(answers)}`;
export const told = (...answers) => `Do this. ${script(...answers)}`;

// Runs `session` with the folders `home` and `work`, and a function that reads a file of `work`.
export async function inFolder(session) {
  const root = await mkdtemp(path.join(os.tmpdir(), "agent"));
  const [home, work] = [path.join(root, "home"), path.join(root, "work")];
  await Promise.all([mkdir(home), mkdir(work)]);
  try {
    await session({ home, work, read: (name) => readFile(path.join(work, name), "utf8") });
  } finally {
    await rm(root, { recursive: true, force: true, maxRetries: 5, retryDelay: 200 });
  }
}

// Runs a program to its end and returns its output. Throws if its status is not 0.
export function run(program, words, { cwd, env, input }) {
  const child = spawn(program, words, { cwd, env: { ...process.env, ...env }, stdio: ["pipe", "pipe", "pipe"] });
  const timer = setTimeout(() => child.kill("SIGKILL"), TIMEOUT_MS);
  let said = "";
  let answer = "";
  child.stdout.on("data", (data) => (answer += data));
  child.stderr.on("data", (data) => (said += data));
  // A program that does not read its input may close it.
  child.stdin.on("error", () => {});
  child.stdin.end(input ?? "");
  return new Promise((resolve, reject) => {
    child.on("error", reject);
    child.on("close", (status) => {
      clearTimeout(timer);
      if (status === 0) resolve({ answer: answer.trim(), said });
      else reject(new Error(`${path.basename(program)} ended with ${status}: ${(answer + said).slice(-2000)}`));
    });
  });
}

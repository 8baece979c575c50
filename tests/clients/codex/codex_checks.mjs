// Codex CLI in a folder of its own, with an MCP server, on a model that says what the prompt tells it to say.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtemp, mkdir, readFile, rm, writeFile } from "node:fs/promises";
import os from "node:os";
import path from "node:path";
import { API, check, main } from "./checks.mjs";

// Codex knows the tools of the last two models. The scripted model is served under these names too.
const UNKNOWN = "scripted";
const WITH_CUSTOM_TOOLS = "gpt-5.5";
const IN_CODE_MODE = "gpt-6-sol";
const TIMEOUT_MS = 120_000;
const CODEX = path.join(process.cwd(), "node_modules", ".bin", "codex");
const MCP_SERVER = path.join(process.cwd(), "river_server.mjs");

const call = (name, args) => `<tool_call>\n${JSON.stringify({ name, arguments: args })}\n</tool_call>`;
const patch = (...lines) => call("apply_patch", { input: ["*** Begin Patch", ...lines, "*** End Patch", ""].join("\n") });
const told = (...answers) => `Do this. SCRIPT: ${JSON.stringify(answers)}`;
const asksForLength = call("mcp__rivers__length_of", { river: "Nile" });

// Runs `session` with a function that runs Codex and returns its output, and one that reads a file of its folder.
async function inFolder(session) {
  const root = await mkdtemp(path.join(os.tmpdir(), "codex"));
  const [home, work] = [path.join(root, "home"), path.join(root, "work")];
  await Promise.all([mkdir(home), mkdir(work)]);
  const config = [
    'model_provider = "penstock"',
    "[model_providers.penstock]",
    'name = "penstock"',
    `base_url = "${API}"`,
    'wire_api = "responses"',
    "request_max_retries = 0",
    "stream_max_retries = 0",
    "[mcp_servers.rivers]",
    `command = ${JSON.stringify(process.execPath)}`,
    `args = [${JSON.stringify(MCP_SERVER)}]`,
  ];
  await writeFile(path.join(home, "config.toml"), config.join("\n"));
  try {
    await session(
      (...words) => codex(work, home, words),
      (name) => readFile(path.join(work, name), "utf8"),
    );
  } finally {
    await rm(root, { recursive: true, force: true });
  }
}

function codex(work, home, words) {
  const options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"];
  const env = { ...process.env, CODEX_HOME: home };
  const child = spawn(CODEX, ["exec", ...options, ...words], { cwd: work, env, stdio: ["ignore", "pipe", "pipe"] });
  const timer = setTimeout(() => child.kill("SIGKILL"), TIMEOUT_MS);
  let said = "";
  let answer = "";
  child.stdout.on("data", (data) => (answer += data));
  child.stderr.on("data", (data) => (said += data));
  return new Promise((resolve, reject) => {
    child.on("error", reject);
    child.on("close", (status) => {
      clearTimeout(timer);
      if (status === 0) resolve({ answer: answer.trim(), said });
      else reject(new Error(`codex ended with ${status}: ${said.slice(-2000)}`));
    });
  });
}

check("three turns with a search for tools, an MCP server, edits and a resumed session", () =>
  inFolder(async (run, read) => {
    const search = call("tool_search", { query: "length of a river" });
    const adds = patch("*** Add File: rivers.txt", '+Nile: "6650" km \\ é', "+Oder");
    const first = await run("-m", WITH_CUSTOM_TOOLS, told(search, asksForLength, adds, "The file is there."));
    assert.equal(first.answer, "The file is there.");
    assert.match(first.said, /rivers\/length_of \(completed\)/);
    assert.equal(await read("rivers.txt"), 'Nile: "6650" km \\ é\nOder\n');
    const changes = patch("*** Update File: rivers.txt", "@@", "-Oder", "+Oder: 840 km");
    const second = await run("resume", "--last", "-m", WITH_CUSTOM_TOOLS, told(changes, "The file is changed."));
    assert.equal(second.answer, "The file is changed.");
    const reads = call("exec_command", { cmd: "cat rivers.txt" });
    const third = await run("resume", "--last", "-m", WITH_CUSTOM_TOOLS, told(`Look.\n${reads}`, "That is all."));
    assert.equal(third.answer, "That is all.");
    assert.match(third.said, /Oder: 840 km/);
  }));

check("a model that it does not know calls commands and the tools of an MCP server", () =>
  inFolder(async (run, read) => {
    const writes = call("exec_command", { cmd: "printf 1 > one.txt" });
    const { answer, said } = await run("-m", UNKNOWN, told(`${asksForLength}\n${writes}`, "Both are done."));
    assert.equal(answer, "Both are done.");
    assert.match(said, /rivers\/length_of \(completed\)/);
    assert.equal(await read("one.txt"), "1");
  }));

check("a model in code mode edits and calls the tools of an MCP server", () =>
  inFolder(async (run, read) => {
    const edit = "*** Begin Patch\n*** Add File: nile.txt\n+long\n*** End Patch\n";
    const code = [
      "text(await tools.mcp__rivers__length_of({ river: 'Nile' }));",
      `text(await tools.apply_patch(${JSON.stringify(edit)}));`,
    ];
    const { answer } = await run("-m", IN_CODE_MODE, told(call("functions__exec", { input: code.join("\n") }), "Done."));
    assert.equal(answer, "Done.");
    assert.equal(await read("nile.txt"), "long\n");
  }));

await main("@openai/codex");

// Codex CLI in a folder of its own, with an MCP server, on a model that says what the prompt tells it to say.

import assert from "node:assert/strict";
import { writeFile } from "node:fs/promises";
import path from "node:path";
import { API, check, main } from "./checks.mjs";
import { call, inFolder, run, told } from "./scripted.mjs";

// Codex knows the tools of the last two models. The scripted model is served under these names too.
const UNKNOWN = "scripted";
const WITH_CUSTOM_TOOLS = "gpt-5.5";
const IN_CODE_MODE = "gpt-6-sol";
const CODEX = path.join(process.cwd(), "node_modules", ".bin", "codex");
const MCP_SERVER = path.join(process.cwd(), "river_server.mjs");

const patch = (...lines) => call("apply_patch", { input: ["*** Begin Patch", ...lines, "*** End Patch", ""].join("\n") });
const asksForLength = call("mcp__rivers__length_of", { river: "Nile" });

// Runs `session` with a function that runs Codex and returns its output, and one that reads a file of its folder.
const inSession = (session) =>
  inFolder(async ({ home, work, read }) => {
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
    const options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"];
    const env = { CODEX_HOME: home };
    await session((...words) => run(CODEX, ["exec", ...options, ...words], { cwd: work, env }), read);
  });

check("three turns with a search for tools, an MCP server, edits and a resumed session", () =>
  inSession(async (codex, read) => {
    const search = call("tool_search", { query: "length of a river" });
    const adds = patch("*** Add File: rivers.txt", '+Nile: "6650" km \\ é', "+Oder");
    const first = await codex("-m", WITH_CUSTOM_TOOLS, told(search, asksForLength, adds, "The file is there."));
    assert.equal(first.answer, "The file is there.");
    assert.match(first.said, /rivers\/length_of \(completed\)/);
    assert.equal(await read("rivers.txt"), 'Nile: "6650" km \\ é\nOder\n');
    const changes = patch("*** Update File: rivers.txt", "@@", "-Oder", "+Oder: 840 km");
    const second = await codex("resume", "--last", "-m", WITH_CUSTOM_TOOLS, told(changes, "The file is changed."));
    assert.equal(second.answer, "The file is changed.");
    const reads = call("exec_command", { cmd: "cat rivers.txt" });
    const third = await codex("resume", "--last", "-m", WITH_CUSTOM_TOOLS, told(`Look.\n${reads}`, "That is all."));
    assert.equal(third.answer, "That is all.");
    assert.match(third.said, /Oder: 840 km/);
  }));

check("a model that it does not know calls commands and the tools of an MCP server", () =>
  inSession(async (codex, read) => {
    const writes = call("exec_command", { cmd: "printf 1 > one.txt" });
    const { answer, said } = await codex("-m", UNKNOWN, told(`${asksForLength}\n${writes}`, "Both are done."));
    assert.equal(answer, "Both are done.");
    assert.match(said, /rivers\/length_of \(completed\)/);
    assert.equal(await read("one.txt"), "1");
  }));

check("a model in code mode edits and calls the tools of an MCP server", () =>
  inSession(async (codex, read) => {
    const edit = "*** Begin Patch\n*** Add File: nile.txt\n+long\n*** End Patch\n";
    const code = [
      "text(await tools.mcp__rivers__length_of({ river: 'Nile' }));",
      `text(await tools.apply_patch(${JSON.stringify(edit)}));`,
    ];
    const { answer } = await codex("-m", IN_CODE_MODE, told(call("functions__exec", { input: code.join("\n") }), "Done."));
    assert.equal(answer, "Done.");
    assert.equal(await read("nile.txt"), "long\n");
  }));

await main("@openai/codex");

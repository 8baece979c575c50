// Cline's command line without a terminal (`cline --json`), on a model that says what the prompt tells it to say.
//
// It resumes a session only in a terminal, so that is not checked.

import assert from "node:assert/strict";
import { writeFile } from "node:fs/promises";
import path from "node:path";
import { API, check, main } from "./checks.mjs";
import { call, inFolder, run, script, told } from "./scripted.mjs";

const MODEL = "scripted";
const PACKAGE = "@cline/cli-linux-x64";
const CLINE = path.join(process.cwd(), "node_modules", PACKAGE, "bin", "cline");
const MCP_SERVERS = { rivers: { command: process.execPath, args: [path.join(process.cwd(), "river_server.mjs")] } };

// Runs `session` with a function that runs Cline and returns its last event, and with the folder.
const inSession = (session) =>
  inFolder(async ({ home, work, read }) => {
    await writeFile(path.join(work, "rivers.txt"), "Oder\nNile\n");
    const servers = path.join(home, "servers.json");
    await writeFile(servers, JSON.stringify({ mcpServers: MCP_SERVERS }));
    const data = ["--data-dir", path.join(home, "data")];
    const env = { HOME: home, CLINE_MCP_SETTINGS_PATH: servers };
    const cline = (...words) => run(CLINE, [...words, ...data], { cwd: work, env });
    await cline("auth", "-p", "openai-compatible", "-k", "none", "-m", MODEL, "-b", API);
    const asked = async (prompt) => {
      const { answer } = await cline("--json", prompt);
      return JSON.parse(answer.split("\n").at(-1));
    };
    await session(asked, { work, read });
  });

check("a file is read and edited, and a command run", () =>
  inSession(async (cline, { work, read }) => {
    const file = path.join(work, "rivers.txt");
    const reads = call("read_files", { files: [{ path: file }] });
    const edits = call("editor", { path: file, old_text: "Oder", new_text: "Oder: 840 km" });
    const both = call("run_commands", { commands: ["cat rivers.txt > seen.txt"] }) + reads;
    const { finishReason, iterations, text } = await cline(told(`I read it.\n${reads}`, edits, both, "All is done."));
    assert.deepEqual([finishReason, iterations, text], ["completed", 4, "All is done."]);
    assert.equal(await read("seen.txt"), "Oder: 840 km\nNile\n");
  }),
);

check("tools of an MCP server are called, and an agent is started", () =>
  inSession(async (cline, { read }) => {
    const counts = call("run_commands", { commands: ["wc -l < rivers.txt > count.txt"] });
    const starts = call("spawn_agent", { systemPrompt: "Count the lines.", task: script(counts, "Two.") });
    const { text } = await cline(told(call("rivers__length_of", { river: "Nile" }), starts, "All is done."));
    assert.equal(text, "All is done.");
    assert.equal((await read("count.txt")).trim(), "2");
  }),
);

await main(PACKAGE);

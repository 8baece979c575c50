// OpenCode without a terminal (`opencode run`), on a model that says what the prompt tells it to say.

import assert from "node:assert/strict";
import { writeFile } from "node:fs/promises";
import path from "node:path";
import { API, check, main } from "./checks.mjs";
import { call, inFolder, run, script, told } from "./scripted.mjs";

const MODEL = "scripted";
const PACKAGE = "opencode-linux-x64";
const OPENCODE = path.join(process.cwd(), "node_modules", PACKAGE, "bin", "opencode");
const CONFIG = {
  model: `penstock/${MODEL}`,
  provider: {
    penstock: {
      npm: "@ai-sdk/openai-compatible",
      options: { baseURL: API, apiKey: "none" },
      models: { [MODEL]: { limit: { context: 131072, output: 8192 } } },
    },
  },
  mcp: { rivers: { type: "local", command: [process.execPath, path.join(process.cwd(), "river_server.mjs")] } },
};

// Runs `session` with a function that runs OpenCode and returns its events, and with the folder.
const inSession = (session) =>
  inFolder(async ({ home, work, read }) => {
    await writeFile(path.join(work, "rivers.txt"), "Oder\nNile\n");
    const env = { HOME: home, OPENCODE_CONFIG_CONTENT: JSON.stringify(CONFIG) };
    for (const name of ["AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD"]) env[`OPENCODE_DISABLE_${name}`] = "1";
    // A prompt among the words would be put in quotation marks, so it is read from the input.
    const opencode = async (input, ...words) => {
      const options = ["run", "--auto", "--format", "json", ...words];
      const { answer } = await run(OPENCODE, options, { cwd: work, env, input });
      return answer.split("\n").map((line) => JSON.parse(line));
    };
    await session(opencode, { work, read });
  });

const textOf = (events) => events.filter(({ type }) => type === "text").map(({ part }) => part.text);
const statesOf = (events) =>
  events.filter(({ type }) => type === "tool_use").map(({ part }) => `${part.tool} ${part.state.status}`);

check("a file is read and edited, a command run, and the session resumed", () =>
  inSession(async (opencode, { work, read }) => {
    const filePath = path.join(work, "rivers.txt");
    const reads = call("read", { filePath });
    const edits = call("edit", { filePath, oldString: "Oder", newString: "Oder: 840 km" });
    const shows = call("bash", { command: "cat rivers.txt > seen.txt", description: "Shows the file" });
    const first = await opencode(told(`I read it.\n${reads}`, edits, shows, "All is done."));
    assert.deepEqual(statesOf(first), ["read completed", "edit completed", "bash completed"]);
    assert.equal(textOf(first).at(-1), "All is done.");
    assert.equal(await read("seen.txt"), "Oder: 840 km\nNile\n");
    const both = call("bash", { command: "touch a", description: "A" }) + call("read", { filePath });
    const second = await opencode(told(`Both.\n${both}`, "Resumed."), "--continue");
    assert.deepEqual(statesOf(second).sort(), ["bash completed", "read completed"]);
    assert.deepEqual([textOf(second).at(-1), second[0].sessionID], ["Resumed.", first[0].sessionID]);
    assert.equal(await read("a"), "");
  }),
);

check("tools of an MCP server are called, and an agent is started", () =>
  inSession(async (opencode, { read }) => {
    const counts = call("bash", { command: "wc -l < rivers.txt > count.txt", description: "Counts" });
    const starts = call("task", { description: "Counts", prompt: script(counts, "Two."), subagent_type: "general" });
    const events = await opencode(told(call("rivers_length_of", { river: "Nile" }), starts, "All is done."));
    assert.deepEqual(statesOf(events), ["rivers_length_of completed", "task completed"]);
    assert.equal(textOf(events).at(-1), "All is done.");
    assert.equal((await read("count.txt")).trim(), "2");
  }),
);

await main(PACKAGE);

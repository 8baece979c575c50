// Claude Code without a terminal (`claude -p`), on a model that says what the prompt tells it to say.

import assert from "node:assert/strict";
import { writeFile } from "node:fs/promises";
import path from "node:path";
import { check, main, URL_OF_SERVER } from "./checks.mjs";
import { call, inFolder, run, script, told } from "./scripted.mjs";

// Claude Code has longer prompts and more betas for a model that it knows. The scripted model is served under both.
const UNKNOWN = "scripted";
const KNOWN = "claude-opus-5-5";
const PACKAGE = "@anthropic-ai/claude-code-linux-x64";
const CLAUDE = path.join(process.cwd(), "node_modules", PACKAGE, "claude");
const MCP_SERVERS = { rivers: { command: process.execPath, args: [path.join(process.cwd(), "river_server.mjs")] } };
const TOOLS = "Read,Edit,Bash,Agent,ToolSearch,WebSearch,mcp__rivers";
const RED_PIXEL =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC";
const SCHEMA = { type: "object", properties: { river: { type: "string" } }, required: ["river"] };

// Runs `session` with a function that runs Claude Code and returns its report, and with the folder.
const inSession = (model, session) =>
  inFolder(async ({ home, work, read }) => {
    await writeFile(path.join(work, "rivers.txt"), "Oder\nNile\n");
    const env = {
      HOME: home,
      ANTHROPIC_BASE_URL: URL_OF_SERVER,
      ANTHROPIC_API_KEY: "none",
      CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    };
    // These two options may have many values, so another one comes before the prompt.
    const options = ["-p", "--mcp-config", JSON.stringify({ mcpServers: MCP_SERVERS }), "--allowedTools", TOOLS];
    options.push("--model", model, "--output-format", "json");
    const claude = async (...words) => {
      const { answer } = await run(CLAUDE, [...options, ...words], { cwd: work, env });
      const report = JSON.parse(answer);
      assert.deepEqual([report.is_error, report.permission_denials], [false, []]);
      return report;
    };
    await session(claude, { work, read });
  });

for (const model of [UNKNOWN, KNOWN])
  check(`${model}: a file is read and edited, a command run, the session resumed and compacted`, () =>
    inSession(model, async (claude, { work, read }) => {
      const file_path = path.join(work, "rivers.txt");
      const reads = call("Read", { file_path });
      const edits = call("Edit", { file_path, old_string: "Oder", new_string: "Oder: 840 km" });
      const shows = call("Bash", { command: "cat rivers.txt > seen.txt", description: "Shows the file" });
      const first = await claude(told(`I read it.\n${reads}`, edits, shows, "All is done."));
      assert.deepEqual([first.result, first.num_turns], ["All is done.", 4]);
      assert.equal(await read("seen.txt"), "Oder: 840 km\nNile\n");
      const both = call("Bash", { command: "touch a", description: "A" }) + call("Read", { file_path });
      const second = await claude("--continue", told(`Both.\n${both}`, "Resumed."));
      assert.deepEqual([second.result, second.session_id], ["Resumed.", first.session_id]);
      assert.equal(await read("a"), "");
      await claude("--continue", "/compact");
      assert.equal((await claude("--continue", told("Short now."))).result, "Short now.");
    }),
  );

check("a known model finds a tool of an MCP server, looks at an image, searches the web and starts an agent", () =>
  inSession(KNOWN, async (claude, { work, read }) => {
    const file_path = path.join(work, "red.png");
    await writeFile(file_path, Buffer.from(RED_PIXEL, "base64"));
    const counts = call("Bash", { command: "wc -l < rivers.txt > count.txt", description: "Counts" });
    const { result, subagent_stats } = await claude(
      told(
        call("ToolSearch", { query: "length of a river", max_results: 5 }),
        call("mcp__rivers__length_of", { river: "Nile" }),
        call("Read", { file_path }),
        call("WebSearch", { query: "rivers" }),
        call("Agent", {
          description: "Counts",
          prompt: script(counts, "Two."),
          subagent_type: "general-purpose",
          run_in_background: false,
        }),
        "All is done.",
      ),
    );
    assert.equal(result, "All is done.");
    assert.deepEqual([subagent_stats.completed, subagent_stats.failed], [1, 0]);
    assert.equal((await read("count.txt")).trim(), "2");
  }),
);

check("an answer has the schema that was asked for", () =>
  inSession(UNKNOWN, async (claude) => {
    const { structured_output } = await claude(
      ...["--json-schema", JSON.stringify(SCHEMA)],
      told(call("StructuredOutput", { river: "Nile" }), "That is it."),
    );
    assert.deepEqual(structured_output, { river: "Nile" });
  }),
);

check("a model that is not served is named", () =>
  inSession("absent", (claude) => assert.rejects(claude("Hello"), /absent/)),
);

await main(PACKAGE);

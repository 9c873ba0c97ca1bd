// Vercel's `ai` with three providers: loops of calls, whole and streamed; an object after a call;
// several calls at once; an agent; a forced call.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool, ToolLoopAgent } from "ai";
import { z } from "zod";
import { ALL, callsText, LAST, answerScript, script } from "./loops.mjs";

const baseURL = process.argv[2] + "/v1";
const openai = createOpenAI({ baseURL, apiKey: "x" });
const anthropic = createAnthropic({ baseURL, apiKey: "x" });
const compatible = createOpenAICompatible({
  name: "trivium", baseURL, apiKey: "x", supportsStructuredOutputs: true, includeUsage: true,
});
const schema = z.object({ pier: z.number().int() });
let paths = [];
const description = "Read a file.", inputSchema = z.object({ path: z.string() });
const read_file = tool({
  description, inputSchema,
  execute: ({ path }) => { paths.push(path); return script(Number(path) + 1); },
});
const read_form = tool({ description, inputSchema, execute: () => answerScript('{"pier": 7}') });
const stopWhen = stepCountIs(10), maxRetries = 0;
const thinking = { anthropic: { thinking: { type: "enabled", budgetTokens: 1_024 } } };

const models = [openai.responses("sim"), openai.chat("sim"), compatible("sim"), anthropic("sim")];
for (const model of models) {
  const options = {
    model, stopWhen, maxRetries, tools: { read_file }, providerOptions: thinking, maxOutputTokens: 400,
  };
  const whole = await generateText({ ...options, prompt: script(0) });
  assert.equal(whole.text.trim(), LAST);
  assert.deepEqual(paths, ALL);
  assert.equal(whole.steps.length, ALL.length + 1);
  assert(whole.totalUsage.outputTokens > 0);
  const messages = [{ role: "user", content: script(0) }, ...whole.response.messages];
  messages.push({ role: "user", content: answerScript("Here.") });
  assert.equal((await generateText({ ...options, messages })).text.trim(), "Here.");
  paths = [];

  const kinds = new Set(), inputs = [];
  const reading = streamText({ ...options, prompt: script(0) });
  for await (const part of reading.fullStream) {
    kinds.add(part.type);
    assert.notEqual(part.type, "error", JSON.stringify(part));
    if (part.type === "tool-call") inputs.push(part.input.path);
  }
  assert.equal((await reading.text).trim(), LAST);
  assert.deepEqual([paths, inputs], [ALL, ALL]);
  for (const kind of ["tool-input-delta", "tool-result", "text-delta"]) assert(kinds.has(kind), kind);
  if (model.provider !== "openai.chat") assert(kinds.has("reasoning-start"), [...kinds].join());
  paths = [];

  const two = answerScript("Both. " + callsText(["read_file", { path: "3" }], ["read_file", { path: "4" }]));
  const both = await generateText({ ...options, prompt: two, stopWhen: stepCountIs(1) });
  assert.deepEqual(both.toolCalls.map((call) => call.input), [{ path: "3" }, { path: "4" }]);
  assert.equal(both.text.trim(), "Both.");
  const agent = new ToolLoopAgent({ ...options, instructions: "Read all of them." });
  assert.equal((await agent.generate({ prompt: script(0) })).text.trim(), LAST);
  paths = [];

  const forced = await generateText({
    ...options, providerOptions: {}, stopWhen: stepCountIs(1), prompt: "Which?",
    tools: { ask: tool({ description, inputSchema }) }, toolChoice: { type: "tool", toolName: "ask" },
  });
  assert.equal(forced.toolCalls[0].toolName, "ask");
  const made = await generateText({
    ...options, tools: { read_form }, output: Output.object({ schema }),
    prompt: answerScript(callsText(["read_form", { path: "a" }])),
  });
  assert.deepEqual(made.output, { pier: 7 });
}

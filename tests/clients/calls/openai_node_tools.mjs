// `openai` for Node: its runner of tools, whole and streamed; helpers of streams with calls, in chats
// and responses; several calls at once; a forced one.
import assert from "node:assert";
import OpenAI from "openai";
import { zodFunction, zodResponsesFunction } from "openai/helpers/zod";
import { z } from "zod";
import { ALL, callsText, LAST, answerScript, script } from "./loops.mjs";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "x", maxRetries: 0 });
const model = "sim", parameters = z.object({ path: z.string() });
const asked = (text) => [{ role: "user", content: text }];
const parsed = { name: "read_file", description: "Read a file.", parameters };
const tool = zodFunction(parsed);

for (const stream of [false, true]) {
  const paths = [];
  const read = ({ path }) => { paths.push(path); return script(Number(path) + 1); };
  const runner = client.chat.completions.runTools({
    model, messages: asked(script(0)), stream, tools: [zodFunction({ ...parsed, function: read })],
  });
  assert.equal((await runner.finalContent()).trim(), LAST);
  assert.deepEqual(paths, ALL);
  assert((await runner.totalUsage()).completion_tokens > 0 || stream);
}

const two = answerScript("Both. " + callsText(["read_file", { path: "a" }], ["read_file", { path: "b" }]));
const arguments_of = [];
const reading = client.chat.completions.stream({ model, messages: asked(two), tools: [tool] });
reading.on("tool_calls.function.arguments.done", (event) => arguments_of.push(event.parsed_arguments));
const final = await reading.finalChatCompletion();
assert.deepEqual(arguments_of, [{ path: "a" }, { path: "b" }]);
assert.equal(final.choices[0].message.content.trim(), "Both.");
assert.equal(final.choices[0].finish_reason, "tool_calls");
const typed = await client.chat.completions.parse({ model, messages: asked(two), tools: [tool] });
assert.deepEqual(
  typed.choices[0].message.tool_calls.map((call) => call.function.parsed_arguments),
  [{ path: "a" }, { path: "b" }],
);
for (const tool_choice of ["required", { type: "function", function: { name: "read_file" } }]) {
  const forced = await client.chat.completions.create({
    model, messages: asked("Which?"), tools: [tool], tool_choice, parallel_tool_calls: false,
  });
  const [call] = forced.choices[0].message.tool_calls;
  assert.equal(typeof JSON.parse(call.function.arguments).path, "string"); // the helper's are strict
}

let input = asked(script(0));
for (const path of ALL) {
  const stream = client.responses.stream({ model, input, tools: [zodResponsesFunction(parsed)] });
  const response = await stream.finalResponse();
  const call = response.output.find((item) => item.type === "function_call");
  assert.deepEqual(call.parsed_arguments, { path });
  const output = script(Number(path) + 1);
  const items = response.output.map(({ parsed_arguments, ...item }) => item);
  input = [...input, ...items, { type: "function_call_output", call_id: call.call_id, output }];
}
const last = await client.responses.create({ model, input, tools: [zodResponsesFunction(parsed)] });
assert.equal(last.output_text.trim(), LAST);

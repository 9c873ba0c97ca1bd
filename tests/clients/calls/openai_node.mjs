// `openai` for Node: whole, streamed, parsed, responses, embeddings, errors.
import assert from "node:assert";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "x", maxRetries: 0 });
const model = "sim", messages = [{ role: "user", content: "Hello" }];
const Pier = z.object({ pier: z.number().int() });

const names = (await client.models.list()).data.map((each) => each.id);
assert(names.includes(model) && names.includes("hash"));
const whole = await client.chat.completions.create({ model, messages, max_tokens: 4, temperature: 0 });
const stream = client.chat.completions.stream({ model, messages, max_tokens: 4, temperature: 0 });
assert.equal(await stream.finalContent(), whole.choices[0].message.content);
const parsed = await client.chat.completions.parse({
  model, messages, response_format: zodResponseFormat(Pier, "pier"),
});
assert(Number.isInteger(parsed.choices[0].message.parsed.pier));
const made = await client.responses.create({ model, input: "Hello", max_output_tokens: 4 });
assert(made.output_text);
const events = [];
const reading = await client.responses.create({
  model, input: "And?", previous_response_id: made.id, max_output_tokens: 4, stream: true,
});
for await (const event of reading) events.push(event.type);
assert(events.includes("response.output_text.delta"));
const formed = await client.responses.parse({
  model, input: "Where?", text: { format: zodTextFormat(Pier, "pier") },
});
assert(Number.isInteger(formed.output_parsed.pier));
const vectors = await client.embeddings.create({ model: "hash", input: ["a", "b"] });
assert.equal(vectors.data.length, 2);
await assert.rejects(
  client.chat.completions.create({ model, messages: [{ role: "user", content: "word ".repeat(9_000) }] }),
  (error) => error.code === "context_length_exceeded" && error.param === "messages",
);

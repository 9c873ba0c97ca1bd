// Vercel's `ai` with both of its providers: text, streams, objects, embeddings, items by their ids.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, streamText } from "ai";
import { z } from "zod";

const baseURL = process.argv[2] + "/v1";
const openai = createOpenAI({ baseURL, apiKey: "x" });
const compatible = createOpenAICompatible({
  name: "trivium", baseURL, apiKey: "x", supportsStructuredOutputs: true,
});
const schema = z.object({ pier: z.number().int() });

for (const model of [openai.responses("sim"), openai.chat("sim"), compatible("sim")]) {
  const first = await generateText({ model, prompt: "Hello", maxOutputTokens: 8, maxRetries: 0 });
  assert(first.text);
  const messages = [
    { role: "user", content: "Hello" }, ...first.response.messages, { role: "user", content: "And?" },
  ];
  const second = await generateText({ model, messages, maxOutputTokens: 8, maxRetries: 0 });
  assert(second.text);
  let streamed = "";
  const reading = streamText({ model, prompt: "Hello", maxOutputTokens: 8, maxRetries: 0 });
  for await (const text of reading.textStream) streamed += text;
  assert(streamed);
  const made = await generateText({
    model, prompt: "Where?", output: Output.object({ schema }), maxRetries: 0,
  });
  assert(Number.isInteger(made.output.pier));
}
const values = ["a", "b"];
for (const model of [openai.embedding("hash"), compatible.textEmbeddingModel?.("hash") ?? compatible.embeddingModel("hash")]) {
  assert.equal((await embedMany({ model, values, maxRetries: 0 })).embeddings.length, 2);
}

// SPDX-License-Identifier: Apache-2.0
// Make calls with OpenAI's SDK for JavaScript and print what each of them threw, as one JSON object a line.
//
// Standard input is {"baseURL", "calls": [{"apiKey", "maxRetries", "headers", "body", "cancel"}, …]}. With `cancel`, the request
// of that id is cancelled at the first event of its stream. The SDK is found from the folder that OPENAI_JS names.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const { default: OpenAI } = createRequire(`${process.env.OPENAI_JS}/`)("openai");
const { baseURL, calls } = JSON.parse(readFileSync(0, "utf8"));

for (const { apiKey, maxRetries, headers, body, cancel } of calls) {
  const client = new OpenAI({ apiKey, baseURL, maxRetries, timeout: 60_000 });
  const told = { raised: null };
  try {
    const answer = await client.images.generate(body, { headers });
    if (body.stream) {
      let first = true;
      for await (const event of answer) {
        if (first && cancel) await client.delete(`/requests/${cancel}`);
        first = false;
      }
    }
  } catch (error) {
    const { message, status, code, type, param, requestID } = error;
    Object.assign(told, { raised: error.constructor.name, message, status, code, type, param, requestID });
  }
  console.log(JSON.stringify(told));
}

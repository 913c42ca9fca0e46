// SPDX-License-Identifier: Apache-2.0
// Make one call with OpenAI's SDK for JavaScript and print what it threw as a line of JSON.
//
// Standard input is {"baseURL", "apiKey", "maxRetries", "headers", "body", "cancel"}. With `cancel`, the request of that id is
// cancelled at the first event of its stream. The SDK is found from the folder that SDKS names.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const { default: OpenAI } = createRequire(`${process.env.SDKS}/`)("openai");
const { baseURL, apiKey, maxRetries, headers, body, cancel } = JSON.parse(readFileSync(0, "utf8"));

const client = new OpenAI({ apiKey, baseURL, maxRetries, timeout: 60_000 });
const found = { raised: null, images: 0 };
try {
  const answer = await client.images.generate(body, { headers });
  if (body.stream) {
    let first = true;
    for await (const event of answer) {
      if (first && cancel) await client.delete(`/requests/${cancel}`);
      first = false;
      if (event.type === "image_generation.completed") found.images += 1;
    }
  } else {
    found.images = answer.data.length;
  }
} catch (error) {
  const { message, status, code, type, param, requestID } = error;
  Object.assign(found, { raised: error.constructor.name, message, status, code, type, param, requestID });
}
console.log(JSON.stringify(found));

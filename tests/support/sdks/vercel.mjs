// SPDX-License-Identifier: Apache-2.0
// Make one call with Vercel's AI SDK and print what it threw as a line of JSON.
//
// Standard input is {"baseURL", "apiKey", "maxRetries", "headers", "body"}; the first argument is the provider's package. The
// packages are found from the folder that SDKS names. Repetitions that came to nothing are one RetryError around the last error.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const require = createRequire(`${process.env.SDKS}/`);
const { generateImage, RetryError } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { baseURL, apiKey, maxRetries, headers, body } = JSON.parse(readFileSync(0, "utf8"));

globalThis.AI_SDK_LOG_WARNINGS = false;
const compatible = process.argv[2] === "@ai-sdk/openai-compatible";
const provider = compatible ? createOpenAICompatible({ name: "worker", baseURL, apiKey }) : createOpenAI({ baseURL, apiKey });
const { prompt, model, size, n, ...others } = body;
const found = { raised: null, images: 0 };
try {
  const providerOptions = { openai: others, worker: others };
  const answer = await generateImage({ model: provider.imageModel(model ?? "digits"), prompt, size, n, maxRetries, headers, providerOptions });
  found.images = answer.images.length;
} catch (error) {
  const last = RetryError.isInstance(error) ? error.lastError : error;
  const { message, statusCode, data, responseHeaders } = last;
  const { code, type, param } = data?.error ?? {};
  const requestID = responseHeaders?.["x-request-id"];
  Object.assign(found, { raised: error.name, message, status: statusCode, code, type, param, requestID });
}
console.log(JSON.stringify(found));

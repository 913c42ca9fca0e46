// SPDX-License-Identifier: Apache-2.0
// Make images with LangChain's tool for OpenAI, and print their number as a line of JSON.
//
// Standard input is {"baseURL", "apiKey", "body"}. The tool sends a style, a quality and a size of its own, and asks for URLs. LangChain is found from the
// folder that SDKS names.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const { DallEAPIWrapper } = createRequire(`${process.env.SDKS}/`)("@langchain/openai");
const { baseURL: baseUrl, apiKey, body } = JSON.parse(readFileSync(0, "utf8"));
const { prompt, model, n } = body;

const tool = new DallEAPIWrapper({ baseUrl, apiKey, model, n });
const answer = await tool.invoke(prompt);
const images = [answer].flat().map((content) => content.image_url?.url ?? content.image_url ?? content);
console.log(JSON.stringify({ raised: null, images: images.filter((image) => image.startsWith("data:image/png;base64,iVBOR")).length }));

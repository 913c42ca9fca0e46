# SPDX-License-Identifier: Apache-2.0
"""Make an image with LlamaIndex's tool for OpenAI, and print the number of images as a line of JSON.

Standard input is {"cache", "body"}. The tool sends a style, a quality, a size and a model's name of its own; the address and the key come
from the environment. It writes the image into the folder `cache`.
"""

import json
import sys

from llama_index.tools.openai.image_generation.base import OpenAIImageGenerationToolSpec  # type: ignore[import-not-found]
from PIL import Image

given = json.load(sys.stdin)
(path,) = OpenAIImageGenerationToolSpec(cache_dir=given["cache"]).image_generation(given["body"]["prompt"], download=True)
print(json.dumps({"raised": None, "images": int(Image.open(path).size == (1024, 1024))}))

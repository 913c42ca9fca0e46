# SPDX-License-Identifier: Apache-2.0
"""Make an image with LlamaIndex's tool for OpenAI, and print the number of images as a line of JSON.

Standard input is {"body"}. The tool sends a style, a quality, a size and a model's name of its own, and asks for a URL. The address and
the key come from the environment.
"""

import base64
import io
import json
import sys

from llama_index.tools.openai.image_generation.base import OpenAIImageGenerationToolSpec  # type: ignore[import-not-found]
from PIL import Image

given = json.load(sys.stdin)
url = OpenAIImageGenerationToolSpec().image_generation(given["body"]["prompt"])
image = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
print(json.dumps({"raised": None, "images": int(image.size == (1024, 1024))}))

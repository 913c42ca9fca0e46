# SPDX-License-Identifier: Apache-2.0
"""The adapters that a request for images names, in all forms of the reference's `lora` object.

Only the name counts, and the worker must know it. A path is only compared with the adapter's own: no client of the data port makes the
worker read one. An integer id is accepted and ignored, as an adapter's identity is its content.
"""

import posixpath
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.admission import MAX_LORA_SCALE, AdapterChoice
from diffusion_worker.errors import ConfigError, refused
from diffusion_worker.sources.parsing import parse_source
from diffusion_worker.sources.source import Source

NAMES = ("name", "lora_name", "adapter")
SCALES = ("scale", "lora_scale")
PATHS = ("path", "local_path", "lora_path", "lora_local_path")
IDS = ("int_id", "lora_int_id")
# More objects than any worker takes; each worker has its own limit.
MAX_OBJECTS = 64
MAX_ID = 2**63 - 1
# Characters of a path shown in a message.
SHOWN_CHARS = 200
ANOTHER_PATH = "Another name for path; give only one of them. No file is read from it: it must be the adapter's source."

Name = Annotated[str | None, Field(min_length=1, max_length=256)]
Scale = Annotated[float | None, Field(ge=-MAX_LORA_SCALE, le=MAX_LORA_SCALE, allow_inf_nan=False)]
Path = Annotated[str | None, Field(min_length=1, max_length=4096)]
Id = Annotated[int | None, Field(ge=1, le=MAX_ID)]


class LoRAObject(BaseModel):
    """An adapter and its strength. A name is required; each value may be given under only one of its names."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[Name, Field(description="The adapter's name on this worker, as GET /v1/models lists it.")] = None
    lora_name: Annotated[Name, Field(description="Another name for name; give only one of them.")] = None
    adapter: Annotated[Name, Field(description="Another name for name; give only one of them.")] = None
    scale: Annotated[
        Scale,
        Field(
            description="Strength of the adapter in this request. Absent means the request's lora_scale, or else the adapter's own scale."
        ),
    ] = None
    lora_scale: Annotated[Scale, Field(description="Another name for scale; give only one of them.")] = None
    path: Annotated[
        Path, Field(description="No file is read from it. If given, it must be the adapter's source; another one is refused.")
    ] = None
    local_path: Annotated[Path, Field(description=ANOTHER_PATH)] = None
    lora_path: Annotated[Path, Field(description=ANOTHER_PATH)] = None
    lora_local_path: Annotated[Path, Field(description=ANOTHER_PATH)] = None
    int_id: Annotated[Id, Field(description="Accepted for compatibility and ignored; the name selects the adapter.")] = None
    lora_int_id: Annotated[Id, Field(description="Another name for int_id, and ignored as well; give only one of them.")] = None


class AskedAdapter(NamedTuple):
    """An adapter that a request names, and the path given with it, if any, which must be that of the adapter's source.

    `field` is the object's place in the request, as `lora[0]`.
    """

    field: str
    choice: AdapterChoice
    path: str | None


def _listed(value: Any) -> Any:
    """Accept an object, a list or null for `lora`, and wrap the object in a list; raise PydanticCustomError for anything else."""
    if isinstance(value, dict):
        return [value]
    if value is None or isinstance(value, list):
        return value
    raise PydanticCustomError("no_lora", "expected an object with the name of an adapter, or a list of them")


def _listed_of_text(value: Any) -> Any:
    """Parse the JSON text of a form's field, and turn a single object into a list of it."""
    try:
        return _listed(msgspec.json.decode(value) if isinstance(value, str) else value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise PydanticCustomError("no_lora", "expected JSON: an object with the name of an adapter, or a list of them") from None


_OBJECT = LoRAObject.model_json_schema()
_DESCRIPTION = "An adapter or a list of them, each an object with a name and optionally a scale."
_SCHEMA = {"anyOf": [_OBJECT, {"type": "array", "items": _OBJECT, "maxItems": MAX_OBJECTS}, {"type": "null"}], "description": _DESCRIPTION}
_TEXT_SCHEMA = {"type": "string", "contentMediaType": "application/json", "description": _DESCRIPTION + " As JSON."}
_Objects = Annotated[list[LoRAObject], Field(max_length=MAX_OBJECTS)] | None

LoRAObjects = Annotated[_Objects, BeforeValidator(_listed), WithJsonSchema(_SCHEMA)]
LoRAText = Annotated[_Objects, BeforeValidator(_listed_of_text), WithJsonSchema(_TEXT_SCHEMA)]


def asked_adapters(objects: Sequence[LoRAObject] | None) -> list[AskedAdapter]:
    """Return the adapters that the objects ask for.

    Raises:
        RequestError: InvalidRequest, an object has no name, or gives a value under two names.
    """
    return [_asked(f"lora[{index}]", each) for index, each in enumerate(objects or [])]


def _asked(field: str, asked: LoRAObject) -> AskedAdapter:
    name = _only(field, asked, NAMES)
    _only(field, asked, IDS)
    if name is None:
        raise refused(f"{field}.name", "the name of an adapter", "none")
    return AskedAdapter(field, AdapterChoice(name, _only(field, asked, SCALES)), _only(field, asked, PATHS))


def _only(field: str, asked: LoRAObject, names: Sequence[str]) -> Any:
    given = [name for name in names if getattr(asked, name) is not None]
    if len(given) > 1:
        second, fields = given[1], " and ".join(given)
        raise refused(f"{field}.{second}", f"only one of {fields}", "both" if len(given) == 2 else "all of them")
    return getattr(asked, given[0]) if given else None


def require_own_paths(engine: Engine, asked: Sequence[AskedAdapter]) -> None:
    """Check that every path in a request is its adapter's source; an unknown name is left to the engine to refuse.

    Raises:
        RequestError: InvalidRequest that names the field and the path.
    """
    for field, choice, path in asked:
        own = engine.adapter_source(choice.name) if path is not None else None
        if path is None or own is None or place_of_text(path) == place_of(own):
            continue
        # Clients of the data port may not learn the adapter's source.
        shown = path.partition("?")[0][:SHOWN_CHARS]
        raise refused(f"{field}.path", f"none, or the source of adapter {choice.name!r}", repr(shown))


def place_of_text(text: str) -> str:
    """Return the location that a client's text names, in the form of `place_of`; a text that is no source is returned as it is."""
    try:
        return place_of(parse_source(text))
    except ConfigError:
        return text


def place_of(source: Source) -> str:
    """Return a source's location as text, without credentials."""
    if source.hugging_face is not None:
        hub = source.hugging_face
        return "/".join(filter(None, [f"hf://{hub.repo}@{hub.revision}", hub.file or hub.subfolder]))
    if source.s3 is not None:
        return source.s3.uri
    if source.pvc is not None:
        return f"pvc://{source.pvc.claim_name}/{posixpath.normpath(source.pvc.path)}"
    return source.http.url if source.http is not None else posixpath.normpath(str(source.path))

# SPDX-License-Identifier: Apache-2.0
"""Manifests of both kinds, made by hypothesis of the schema files themselves: inside the schema, and just outside it.

A new field of a schema is covered by being there. Three forms of CEL rules are understood, so that enough manifests pass them. These are
exactly one of some fields, a value of a list, and a required end of a string. Real: the schemas. Not real: the users.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, Kind
from support.apiserver.kind_api import schemas, spec_schema

OPTIONAL_FIELDS = 20  # out of 100; with more, hardly a manifest meets all the rules between fields
MOST_ITEMS = 3
FEW = {"replicas": 3}  # fewer than the schema allows: each is a pod
SUFFIXES = ("", "-" + "a" * 33, "-" + "a" * 80, "-" + "b" * 250, ".x", "-", "É", "X", "_x", " ", "/x")
KEYS = ("cpu", "memory", "ephemeral-storage", "example.com/dongle", "a", "topology.kubernetes.io/zone", "Ü", "", "a b", "x" * 64, "-x-")
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 2**31, 2**63, "", "x", "0", "1e3", "-1", "1.0", "9" * 32, "100Ei", "0.001m", "é", "a\nb", "\x00", "🙂" * 40,
    "x" * 10_000, "$(HOME)", "{{.}}", [], [None], ["a", "a"], {}, {"a": 1}, {"": ""},
)  # fmt: skip


class Case(NamedTuple):
    """A manifest without a name, and the fields in it that were put just outside."""

    kind: Kind
    document: Any
    suffix: str
    """The name's suffix."""
    touched: tuple[str, ...]


def cases(number: int, *, count: int) -> list[Case]:
    """The same from the same number."""
    found: list[Case] = []

    @seed(number)
    @settings(max_examples=count, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(_case())
    def collect(one: Case) -> None:
        found.append(one)

    collect()
    return found[:count]


def field_names(schema: Any) -> Iterator[str]:
    """Yield a schema's fields at all depths."""
    return (name for one in schemas(schema) for name in one.get("properties", ()))


@st.composite
def _case(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from((DEPLOYMENT, DEPLOYMENT, ADAPTER)))
    schema = spec_schema(kind.plural)
    document = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {}, "spec": copy.deepcopy(draw(_inside(schema)))}
    if kind is ADAPTER and draw(st.booleans()):
        document["spec"]["deploymentRef"] = {"name": f"m{draw(st.integers(0, 49))}"}
    suffix = draw(st.sampled_from(SUFFIXES)) if draw(st.integers(0, 9)) == 0 else ""
    touched = [] if not suffix else ["name"]
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 1, 2)))):
        if "spec" not in document:
            break
        touched += draw(_put_outside(document, schema))
    return Case(kind, document, suffix, tuple(touched))


_known: dict[tuple[int, str], st.SearchStrategy[Any]] = {}


def _inside(schema: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Each is made once: schemas live as long as the process."""
    key = (id(schema), name)
    if key not in _known:
        _known[key] = _strategy(schema, name)
    return _known[key]


def _strategy(schema: Any, name: str) -> st.SearchStrategy[Any]:
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if choice := _rule(schema, r"^self in \[([^\]]*)\]$"):
        return st.sampled_from([int(one) for one in choice.split(",")])
    if schema.get("x-kubernetes-int-or-string"):
        return st.one_of(st.integers(0, 2**40), _string(schema))
    match schema.get("type"):
        case "object" if "properties" in schema:
            return _object(schema)
        case "object":
            return st.dictionaries(st.sampled_from(KEYS[:6]), _inside(schema.get("additionalProperties", {})), max_size=MOST_ITEMS)
        case "array":
            return _array(schema)
        case "integer":
            return st.integers(schema.get("minimum", -(2**31)), min(schema.get("maximum", 2**31 - 1), FEW.get(name, 2**31)))
        case "boolean":
            return st.booleans()
    return _string(schema)


@st.composite
def _object(draw: st.DrawFn, schema: Any) -> Any:
    fields = schema["properties"]
    chosen = [name for name in fields if name in schema.get("required", ()) or draw(st.integers(0, 99)) >= 100 - OPTIONAL_FIELDS]
    if rule := _rule(schema, r"^\[((?:has\(self\.\w+\)(?:, )?)+)\]\.filter\(x, x\)\.size\(\) == 1$"):
        exclusive = re.findall(r"self\.(\w+)", rule)
        chosen = [name for name in chosen if name not in exclusive] + [draw(st.sampled_from(exclusive))]
    return {name: draw(_inside(fields[name], name)) for name in chosen}


def _array(schema: Any) -> st.SearchStrategy[Any]:
    kind, keys = schema.get("x-kubernetes-list-type"), schema.get("x-kubernetes-list-map-keys", ())
    most, items = min(schema.get("maxItems", MOST_ITEMS), MOST_ITEMS), _inside(schema["items"])
    if kind == "map":
        return st.lists(items, max_size=most, unique_by=lambda item: tuple(str(item.get(key)) for key in keys))
    return st.lists(items, max_size=most, unique_by=str if kind == "set" else None)


def _string(schema: Any) -> st.SearchStrategy[str]:
    least, most = schema.get("minLength", 0), schema.get("maxLength", 1000)
    end = _rule(schema, r"endsWith\('([^']*)'\)") or ""
    # In Python `$` also is before a newline at the end.
    pattern = schema["pattern"].removesuffix("$") + r"\Z" if "pattern" in schema else None
    plain = st.from_regex(re.compile(pattern)) if pattern else st.text(min_size=least, max_size=min(most, 20))
    return plain.map(lambda text: text + end).filter(lambda text: least <= len(text) <= most)


def _rule(schema: Any, form: str) -> str | None:
    rules = [rule["rule"] for rule in schema.get("x-kubernetes-validations", ())]
    found = [match[1] for rule in rules if (match := re.search(form, rule)) and not rule.startswith("!")]
    return found[0] if found else None


@st.composite
def _put_outside(draw: st.DrawFn, document: Any, schema: Any) -> list[str]:
    """Changes one place; the fields that it is about, from the outermost on."""
    nodes = list(_nodes(document, "spec", schema, ("spec",)))
    path, holder, place, schema = nodes[draw(st.integers(0, len(nodes) - 1))]
    value, kind = holder[place], draw(st.integers(0, 5))
    if kind == 0 and isinstance(value, dict):
        value["unheardOf"] = copy.deepcopy(draw(st.sampled_from(ODD)))
        return [*path, "unheardOf"]
    if kind == 1 and isinstance(holder, dict):
        del holder[place]
        return [*path]
    if kind == 2 and isinstance(value, dict) and schema.get("properties"):
        name = draw(st.sampled_from(sorted(schema["properties"])))
        value[name] = copy.deepcopy(draw(_inside(schema["properties"][name], name)))
        return [*path, name]
    if kind == 3 and isinstance(value, dict) and "additionalProperties" in schema:
        key = draw(st.sampled_from(KEYS))
        value[key] = copy.deepcopy(draw(_inside(schema["additionalProperties"])))
        return [*path, key]
    over = _over(schema, value)
    holder[place] = copy.deepcopy(draw(st.sampled_from((*over, *ODD) if kind == 4 or not over else over)))
    return [*path]


def _over(schema: Any, value: Any) -> list[Any]:
    """Just over a bound."""
    found: list[Any] = []
    if "minimum" in schema:
        found += [schema["minimum"] - 1, schema["maximum"] + 1 if "maximum" in schema else -schema["minimum"] - 1]
    if "maxLength" in schema and isinstance(value, str):
        found += [(value or "a").ljust(schema["maxLength"] + 1, "a"), value + "\n", f" {value}", value + "é", value.upper()]
    if "maxItems" in schema and isinstance(value, list):
        found += [[copy.deepcopy(one) for one in value[:1] * (schema["maxItems"] + 1)], value * 2]
    if "maxProperties" in schema:
        found.append({f"k{number}": "v" for number in range(schema["maxProperties"] + 1)})
    return found


def _nodes(holder: Any, key: Any, schema: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any, Any]]:
    """All places at and under one: the fields that they are about, what holds them, under which key, and their schema."""
    yield path, holder, key, schema
    value = holder[key]
    if isinstance(value, dict):
        for name in value:
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if isinstance(inner, dict):
                yield from _nodes(value, name, inner, (*path, name))
    if isinstance(value, list):
        for number in range(len(value)):
            yield from _nodes(value, number, schema.get("items", {}), path)

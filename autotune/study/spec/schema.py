"""JSON schema of `study.yaml`, made from the fields of `StudySpec` and the table of settings, for editors."""

from typing import Any, get_args, get_type_hints

from pydantic import BeforeValidator, TypeAdapter

from autotune.scoring.metrics import METRICS
from autotune.study.spec.presets import GOALS
from autotune.study.spec.settings import SETTINGS
from autotune.study.spec.spec import StudySpec

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
AMOUNT: Schema = {"type": ["number", "string", "null"]}
BOUNDS: Schema = {"min": AMOUNT, "max": AMOUNT}
METRIC: Schema = {"enum": sorted(METRICS)}
OBJECTIVE: Schema = {
    "type": "object", "required": ["metric"], "additionalProperties": False,
    "properties": {"name": TEXT, "metric": METRIC, "weight": {"type": "number"}, "description": TEXT} | BOUNDS,
}  # fmt: skip


def _one_or_more(item: Schema) -> Schema:
    return {"anyOf": [TEXT, item, {"type": "array", "items": {"anyOf": [TEXT, item]}}]}


# Keys that a reader of their own takes in more forms than their field has.
FORMS: dict[str, Schema] = {
    "target": TEXT,
    "space": _one_or_more({"type": "object"}),
    "goal": {"enum": [*GOALS, None]},
    "objectives": _one_or_more(OBJECTIVE),
    "constraints": {"anyOf": [
        {"type": "object", "propertyNames": METRIC,
         "additionalProperties": {"type": "object", "properties": BOUNDS, "additionalProperties": False}},
        {"type": "array", "items": {"type": "object", "properties": {"metric": METRIC} | BOUNDS, "required": ["metric"]}},
        {"type": "null"},
    ]},
    "base_config": {"type": ["string", "object", "null"]},
    "script_args": {"anyOf": [TEXT, {"type": "array", "items": {"type": ["string", "number", "boolean"]}}]},
    "script_set": TEXTS,
    "arg_mappings": TEXTS,
    "executor_options": TEXTS,
    "global_batch": {"anyOf": [
        {"enum": ["keep", "free", None]}, {"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^\s*\d+\s*(\.\.\s*\d+\s*)?$"},
        {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 2, "maxItems": 2},
    ]},
}  # fmt: skip


def study_schema() -> Schema:
    """The schema; each key has its meaning, and its default where there is one."""
    hints = get_type_hints(StudySpec, include_extras=True)
    properties = {key: _property(key, hints[key]) for key in StudySpec.model_fields if key in SETTINGS}
    return {
        "$schema": DIALECT,
        "title": "autotune study.yaml",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "anyOf": [{"required": ["target"]}, {"required": ["command"]}],
    }


def _property(key: str, hint: Any) -> Schema:
    own = FORMS.get(key) or TypeAdapter(hint).json_schema()
    if key not in FORMS and _is_read_from_text(hint):
        own = {"anyOf": [*own.get("anyOf", [own]), TEXT]}
    field, setting = StudySpec.model_fields[key], SETTINGS[key]
    found: Schema = {"description": f"{setting.help} {setting.more}".strip()} | own
    if key not in FORMS and isinstance(field.default, str | int | float):
        found["default"] = field.default
    return found


def _is_read_from_text(hint: Any) -> bool:
    """Returns whether a validator reads the value first, from a text such as `10m` or `4GiB`."""
    read = any(isinstance(each, BeforeValidator) for each in getattr(hint, "__metadata__", ()))
    return read or any(_is_read_from_text(each) for each in get_args(hint))

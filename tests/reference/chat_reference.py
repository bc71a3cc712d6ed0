"""Writes chat.json: what Jinja2, set up as transformers does it, makes of chat templates.

    python3 tests/reference/chat_reference.py [RECIPES] > tests/reference/chat.json

Needs jinja2 only (3.1.6 was used); the environment follows `_compile_jinja_template` of
transformers 5.23.0 (utils/chat_template_utils.py). RECIPES is the directory of upstream recipes,
`../shared/recipes` by default. Of upstream templates only the length and the FNV-1a hash of what
they render are kept, of the templates below the text itself.
"""

import json
import pathlib
import re
import sys

from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.sandbox import ImmutableSandboxedEnvironment

SPECIALS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}

CONVERSATIONS = {
    "one turn": [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "It is 4."},
    ],
    "system and two turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße!\n\nWho are you?"},
        {"role": "assistant", "content": "<b>Nobody</b> & 'no one'\n"},
        {"role": "user", "content": "  spaces  "},
        {"role": "assistant", "content": "  kept?  "},
    ],
    "ends with the user": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
}

TEMPLATES = {
    "white space": (
        "{% for m in messages %}\n  {% if m['role'] == 'user' %}\nU {{ m['content'] }}\n"
        "  {%- else -%}\n  A {{ m['content'] | trim }}  {% endif %}\n{% endfor %}\n"
        "{% if add_generation_prompt %}\nA {% endif %}\n"
    ),
    "loop controls and namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{{ ns.n }}:{{ m.content }};"
        "{% if ns.n == 3 %}{% break %}{% endif %}{% endfor %}{{ messages[1:] | length }}"
    ),
    "python methods": (
        "{% for m in messages %}{{ m['content'].strip().split(' ')[-1].upper() }}|"
        "{{ m.get('name', 'none') }}|{{ m.items() | list | length }}|"
        "{{ m['role'].startswith('a') and m.content.endswith('.') }}\n{% endfor %}"
        "{{ messages[-1].content.replace('b', 'x').lstrip(' ') }}"
    ),
    "tojson": (
        "{{ messages | tojson }}\n{{ messages[0] | tojson(indent=2) }}\n"
        "{{ {'b': [1, 2.5, true, none], 'a': 'ü', 'e': [], 'o': {}} | tojson(sort_keys=true) }}\n"
        "{{ [[], {}, [1, [2]]] | tojson(indent=4) }}"
    ),
    "optional values": (
        "{% if tools %}T{% endif %}{% if tools is none %}none{% endif %}"
        "{% if documents is defined %}D{% endif %}{% if add_generation_prompt is defined and "
        "add_generation_prompt %}G{% endif %}{{ bos_token }}{% if undefined_thing is defined %}U"
        "{% endif %}{{ messages[0]['missing'] }}{% for m in messages %}"
        "{% if m.content is string %}s{% endif %}{% if m.role in ['user', 'system'] %}r{% endif %}"
        "{% endfor %}{{ eos_token }}"
    ),
    "raises": (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}"
        "{% endif %}{{ messages[0]['content'] }}"
    ),
    "macro": (
        "{% macro turn(m) -%}[{{ m.role }}] {{ m.content }}{%- endmacro %}"
        "{% for m in messages %}{{ turn(m) }}\n{% endfor %}"
    ),
    "generation blocks": (
        "{% for m in messages %}{% if m.role == 'assistant' %}A: \n"
        "{%- generation -%}\n {{ m.content + eos_token }}\n{%- endgeneration %}\n"
        "{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    ),
}


class Generation(Extension):
    """The tag, without the tracking."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


def render(env, template, messages, prompt):
    try:
        return env.from_string(template).render(
            messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **SPECIALS
        )
    except TemplateError as error:
        return {"error": str(error)}


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value


def upstream(root):
    """Every chat template of the recipes, by path."""
    for path in sorted(pathlib.Path(root).rglob("*.yaml")):
        found = re.search(r'^chat_template: (".*")\s*$', path.read_text(), re.MULTILINE)
        if found:
            yield str(path.relative_to(root)), json.loads(found[1])


def main():
    env = environment()
    root = sys.argv[1] if len(sys.argv) > 1 else "../shared/recipes"
    cases = lambda: ((n, m, p) for n, m in CONVERSATIONS.items() for p in (False, True))
    own, others = [], []
    for name, template in TEMPLATES.items():
        for conversation, messages, prompt in cases():
            text = render(env, template, messages, prompt)
            own.append({"template": name, "conversation": conversation,
                        "add_generation_prompt": prompt, "text": text})
    for path, template in upstream(root):
        for conversation, messages, prompt in cases():
            text = render(env, template, messages, prompt).encode()
            others.append({"recipe": path, "conversation": conversation,
                           "add_generation_prompt": prompt, "bytes": len(text),
                           "fnv1a": f"{fnv1a(text):016x}"})
    out = {"specials": SPECIALS, "conversations": CONVERSATIONS, "templates": TEMPLATES,
           "rendered": own, "upstream": others}
    print(json.dumps(out, indent=1, ensure_ascii=False))


main()

"""Writes chat.json: what Jinja2, set up as transformers does it, makes of chat templates.

    python3 tests/reference/chat_reference.py UPSTREAM [RECIPES] > tests/reference/chat.json

Needs jinja2 only (3.1.6 was used); the environment follows `_compile_jinja_template` of
transformers 5.23.0 (utils/chat_template_utils.py). RECIPES is the directory of upstream recipes,
`../shared/recipes` by default. UPSTREAM has clones of the repositories in REVISIONS, named like
them without their owner. Of upstream templates only the length and the FNV-1a hash of what they
render are kept, of the templates below the text itself.
"""

import datetime
import json
import pathlib
import re
import subprocess
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

# Published templates, by family: where they are, in which revision of the repository.
REVISIONS = {
    "chujiezheng/chat_templates": "11c495621569969f264ee70b5c8bb49ba7a1a410",
    "huggingface/trl": "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    "ikawrakow/ik_llama.cpp": "8337e4cd3861406fc04e0854b1409cd1b027fbc9",
}
CHAT, TRL, LLAMA_CPP = ([name, folder] for name, folder in
                        zip(REVISIONS, ["chat_templates", "trl/chat_templates", "models/templates"]))
PUBLISHED = {
    "Llama 2": (CHAT, "llama-2-chat"),
    "Llama 3": (TRL, "llama3"),
    "Llama 3, TRL's for training": (TRL, "llama3_training"),
    "Llama 3.1": (LLAMA_CPP, "meta-llama-Llama-3.1-8B-Instruct"),
    "Llama 3.2": (LLAMA_CPP, "meta-llama-Llama-3.2-3B-Instruct"),
    "Mistral": (CHAT, "mistral-instruct"),
    "Mistral Nemo": (LLAMA_CPP, "mistralai-Mistral-Nemo-Instruct-2407"),
    "Mistral Small 3.2": (LLAMA_CPP, "Mistral-Small-3.2-24B-Instruct-2506"),
    "Qwen 2.5": (LLAMA_CPP, "Qwen-Qwen2.5-7B-Instruct"),
    "Qwen 2.5, TRL's for training": (TRL, "qwen2_5_training"),
    "Qwen 3": (LLAMA_CPP, "Qwen-Qwen3-0.6B"),
    "Qwen 3, TRL's for training": (TRL, "qwen3_training"),
    "Qwen 3 Instruct 2507": (TRL, "qwen3_instruct_2507"),
    "SmolLM 3": (LLAMA_CPP, "HuggingFaceTB-SmolLM3-3B"),
    "Gemma 2": (LLAMA_CPP, "google-gemma-2-2b-it"),
    "Gemma 3": (TRL, "gemma3"),
    "QwQ": (LLAMA_CPP, "Qwen-QwQ-32B"),
    "Kimi K2": (LLAMA_CPP, "moonshotai-Kimi-K2"),
    "Phi 3.5": (LLAMA_CPP, "microsoft-Phi-3.5-mini-instruct"),
    "DeepSeek R1 on Llama": (LLAMA_CPP, "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"),
    "Command R7B": (LLAMA_CPP, "CohereForAI-c4ai-command-r7b-12-2024-tool_use"),
    "Granite 3.3": (LLAMA_CPP, "ibm-granite-granite-3.3-2B-Instruct"),
    "GLM 4.6": (LLAMA_CPP, "GLM-4.6"),
    "gpt-oss": (LLAMA_CPP, "openai-gpt-oss-120b"),
    "gpt-oss, TRL's for training": (TRL, "gptoss_training"),
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
    "none and undefined": (
        "{% if tools is iterable and tools | length > 0 %}T{% endif %}{% if tools is not none %}t"
        "{% endif %}{% if nothing is iterable %}u{% endif %}{% if 'a' is iterable %}s{% endif %}"
        "{% for m in messages if m.calls is iterable and m.calls is not undefined %}c{% endfor %}"
    ),
    "tojson in ASCII": "{{ messages | tojson(ensure_ascii=true) }}{{ ['\U0001f600é'] | tojson(ensure_ascii=True, indent=1) }}",
    "names in generation blocks": (
        "{% set last = namespace(role='', n=0) %}{% set here = 'outside' %}{% for m in messages %}\n"
        "    {% if m.role == 'assistant' %}\n    {% generation %}\n    {% set last.n = last.n + 1 %}\n"
        "{% set here = m.content %}\n{{ here }} {{ last.n }}, {{ loop.index }} after {{ last.role }}\n"
        "    {%- endgeneration -%}\n  {% endif %}{% set last.role = m.role %}\n  {{ here }}\n"
        "{% endfor %}{{ last.n }}"
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
    # The date of Evenkeel's.
    env.globals["strftime_now"] = datetime.datetime(2024, 7, 26).strftime
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


def hashed(text):
    """Length and hash of a text; those of its message if the template raised an error."""
    error = isinstance(text, dict)
    text = (text["error"] if error else text).encode()
    return {"error": error, "bytes": len(text), "fnv1a": f"{fnv1a(text):016x}"}


def published(clones):
    """Every published template, with its place."""
    for family, ((repository, folder), name) in PUBLISHED.items():
        place = {"repository": repository, "path": f"{folder}/{name}.jinja",
                 "revision": REVISIONS[repository]}
        shown = ["git", "-C", pathlib.Path(clones) / repository.split("/")[1], "show",
                 f"{place['revision']}:{place['path']}"]
        text = subprocess.run(shown, check=True, capture_output=True, text=True).stdout
        yield family, place, text


def upstream(root):
    """Every chat template of the recipes, by path."""
    for path in sorted(pathlib.Path(root).rglob("*.yaml")):
        found = re.search(r'^chat_template: (".*")\s*$', path.read_text(), re.MULTILINE)
        if found:
            yield str(path.relative_to(root)), json.loads(found[1])


def main():
    env = environment()
    root = sys.argv[2] if len(sys.argv) > 2 else "../shared/recipes"
    cases = lambda: ((n, m, p) for n, m in CONVERSATIONS.items() for p in (False, True))
    own, others = [], []
    for name, template in TEMPLATES.items():
        for conversation, messages, prompt in cases():
            text = render(env, template, messages, prompt)
            own.append({"template": name, "conversation": conversation,
                        "add_generation_prompt": prompt, "text": text})
    for path, template in upstream(root):
        for conversation, messages, prompt in cases():
            text = hashed(render(env, template, messages, prompt))
            others.append({"recipe": path, "conversation": conversation,
                           "add_generation_prompt": prompt, **text})
    families = []
    for family, place, template in published(sys.argv[1]):
        texts = [{"conversation": conversation, "add_generation_prompt": prompt,
                  **hashed(render(env, template, messages, prompt))}
                 for conversation, messages, prompt in cases()]
        families.append({"family": family, **place, "rendered": texts})
    out = {"specials": SPECIALS, "conversations": CONVERSATIONS, "templates": TEMPLATES,
           "rendered": own, "upstream": others, "published": families}
    print(json.dumps(out, indent=1, ensure_ascii=False))


main()

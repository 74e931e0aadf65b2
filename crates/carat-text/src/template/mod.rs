//! Chat templates, rendered as the Hugging Face renderer does.

mod clock;
mod environment;
mod json;
mod message;
mod python;

use std::collections::BTreeMap;
use std::sync::Arc;

use carat_bundle::text::TextAssets;
use minijinja::Environment;
use serde_json::{Map, Value};

pub use message::{Message, RenderInput};

use crate::declared::is_instruct;
use crate::error::TextError;
use crate::reply::THINKING_TAGS;

/// Name of the template that is used unless tools are offered.
const DEFAULT: &str = "default";
/// Name of the template that is used when tools are offered, if there is one.
const TOOL_USE: &str = "tool_use";

/// A checkpoint's chat templates, compiled.
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    /// Template names, and whether each understands content given in parts.
    names: BTreeMap<String, bool>,
    /// `bos_token` and its relatives.
    special: Map<String, Value>,
    main: String,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a checkpoint's templates; `None` where it has none.
    ///
    /// # Errors
    ///
    /// [`TextError::BadTemplate`] for one that is no template or beyond the limits.
    pub fn from_assets(assets: &TextAssets) -> Result<Option<Self>, TextError> {
        let config = &assets.config;
        let mut sources = config.named_templates.clone();
        if let Some(source) = &config.chat_template {
            sources.insert(DEFAULT.to_owned(), source.clone());
        }
        let Some(first) = sources.keys().next() else {
            return Ok(None);
        };
        let main = if sources.contains_key(DEFAULT) {
            DEFAULT.to_owned()
        } else {
            first.clone()
        };
        let environment = environment::build(&sources)?;
        let names = sources
            .iter()
            .map(|(name, source)| (name.clone(), message::reads_parts(source)))
            .collect();
        let mut special = Map::new();
        for (name, token) in [
            ("bos_token", &config.bos),
            ("eos_token", &config.eos),
            ("pad_token", &config.pad),
            ("unk_token", &config.unk),
        ] {
            if let Some(token) = token {
                special.insert(name.to_owned(), token.content.clone().into());
            }
        }
        Ok(Some(Self {
            environment: Arc::new(environment),
            names,
            special,
            main,
        }))
    }

    /// As [`ChatTemplate::from_assets`], for those who need a template.
    ///
    /// # Errors
    ///
    /// Also [`TextError::MissingTemplate`], which says whether the model is a chat
    /// model (its template was lost) or a base model.
    pub fn require(assets: &TextAssets, name: Option<&str>) -> Result<Self, TextError> {
        Self::from_assets(assets)?.ok_or_else(|| TextError::MissingTemplate {
            name: name.map(str::to_owned),
            instruct: is_instruct(assets, name),
        })
    }

    /// Name of the template used without tools.
    pub fn name(&self) -> &str {
        &self.main
    }

    /// Renders a conversation to the prompt's text. The text carries its special
    /// tokens: encode it with [`AddSpecial::No`](crate::AddSpecial::No).
    ///
    /// # Errors
    ///
    /// [`TextError::TemplateRaised`] where the template refuses the conversation
    /// (say, an unknown role), [`TextError::BadMessage`] for a message that is no
    /// message, [`TextError::Render`] for everything else.
    pub fn render(&self, input: &RenderInput<'_>) -> Result<String, TextError> {
        let name = match input.tools {
            Some(_) if self.names.contains_key(TOOL_USE) => TOOL_USE,
            _ => self.main.as_str(),
        };
        let parts = self.names.get(name).copied().unwrap_or(false);
        let mut context = Map::new();
        context.extend(self.special.clone());
        context.insert("messages".into(), message::values(input.messages, parts)?);
        let tools = input.tools.cloned().unwrap_or(Value::Null);
        context.insert("tools".into(), tools);
        context.insert("documents".into(), Value::Null);
        context.insert(
            "add_generation_prompt".into(),
            input.add_generation_prompt.into(),
        );
        if let Some(thinking) = input.enable_thinking {
            context.insert("enable_thinking".into(), thinking.into());
        }
        for (key, value) in &input.extra {
            context.insert(key.clone(), value.clone());
        }
        let now = clock::Moment::at(input.now.unwrap_or_else(clock::now));
        environment::render(&self.environment, name, context, now)
    }

    /// Whether a rendered prompt ends inside an open thinking block, so that the
    /// answer begins with the thought and without an opening tag.
    pub fn opens_thinking(rendered: &str) -> bool {
        let end = rendered.trim_end();
        THINKING_TAGS.iter().any(|(open, _)| end.ends_with(open))
    }
}

//! The flat list of operations that a spec is lowered to.

use carat_bundle::spec::{Activation, FfnSpec, MixerSpec, ModelSpec, NormSpec};

use crate::{KvFormat, ModelError, Output};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name(pub usize);
    };
}
id!(
    /// Index into [`Plan::buffers`].
    BufferId
);
id!(
    /// Index into [`Plan::weights`].
    WeightId
);
id!(
    /// Index into [`Plan::states`].
    StateId
);

/// How many rows a buffer has in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// One row per token of the batch (M).
    Tokens,
    /// One row per requested logit row (R).
    LogitRows,
}

/// A scratch matrix `[rows, columns]` of fp32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferDecl {
    /// Name in listings.
    pub name: &'static str,
    /// Row count.
    pub rows: Extent,
    /// Column count.
    pub columns: usize,
}

/// A state that lives across steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateDecl {
    /// Keys and values of one layer: `kv_heads * head_dim` each per position.
    Kv {
        /// Layer index, for listings.
        layer: usize,
        /// Key/value heads.
        kv_heads: usize,
        /// Width of a head.
        head_dim: usize,
    },
}

/// One matrix of a [`Op::Linear`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Projection {
    /// `[outputs, inputs]`.
    pub weight: WeightId,
    /// `[outputs]`.
    pub bias: Option<WeightId>,
    /// Where the product goes.
    pub out: BufferId,
}

/// One operation. Buffers named `out` are overwritten.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// `out[m] = table[token_ids[m]] * scale`.
    Embed {
        /// `[vocab, hidden]`.
        table: WeightId,
        /// Factor on each row.
        scale: f32,
        /// `[M, hidden]`.
        out: BufferId,
    },
    /// RMS norm over each of `groups` equal parts of a row.
    RmsNorm {
        /// What is normalised.
        input: BufferId,
        /// Gain, one part long.
        weight: WeightId,
        /// Epsilon and offset.
        norm: NormSpec,
        /// Parts per row (heads for a per-head norm).
        groups: usize,
        /// May be `input`.
        out: BufferId,
    },
    /// Products of one input with one or more matrices.
    Linear {
        /// `[rows, inputs]`.
        input: BufferId,
        /// The matrices; more than one where they share the input.
        projections: Vec<Projection>,
    },
    /// Rotates `heads` heads of each row by its position, in place.
    Rope {
        /// `[M, heads * head_dim]`.
        buffer: BufferId,
        /// Index into the spec's ropes.
        rope: usize,
        /// Heads per row.
        heads: usize,
        /// Width of a head.
        head_dim: usize,
    },
    /// Stores each row's key and value at its slot.
    KvWrite {
        /// `[M, kv_heads * head_dim]`.
        key: BufferId,
        /// `[M, kv_heads * head_dim]`.
        value: BufferId,
        /// The layer's cache.
        state: StateId,
    },
    /// Softmax attention of each row over its sequence's cache.
    Attention {
        /// `[M, heads * head_dim]`.
        query: BufferId,
        /// The layer's cache.
        state: StateId,
        /// Query heads.
        heads: usize,
        /// Factor on `q · k`.
        scale: f32,
        /// A row sees at most this many positions, its own included.
        window: Option<usize>,
        /// `c * tanh(x / c)` on scores.
        softcap: Option<f32>,
        /// `[M, heads * head_dim]`.
        out: BufferId,
    },
    /// `out = activation(gate) * up`.
    Gated {
        /// `[M, f]`; may be `out`.
        gate: BufferId,
        /// `[M, f]`.
        up: BufferId,
        /// The activation.
        activation: Activation,
        /// `[M, f]`.
        out: BufferId,
    },
    /// `accumulator += scale * input`.
    AddScaled {
        /// The residual stream.
        accumulator: BufferId,
        /// What is added.
        input: BufferId,
        /// Factor.
        scale: f32,
    },
    /// Copies the batch's logit rows.
    SelectRows {
        /// `[M, columns]`.
        input: BufferId,
        /// `[R, columns]`.
        out: BufferId,
    },
    /// `buffer = softcap(buffer * scale)`.
    ScaleCap {
        /// In place.
        buffer: BufferId,
        /// Factor.
        scale: f32,
        /// `c * tanh(x / c)`.
        softcap: Option<f32>,
    },
    /// Hands a buffer out, if the step asked for it.
    Tap {
        /// What the buffer holds here.
        output: Output,
        /// The buffer.
        buffer: BufferId,
    },
}

impl Op {
    /// Name in listings and profiles.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed { .. } => "embed",
            Op::RmsNorm { .. } => "rms_norm",
            Op::Linear { .. } => "linear",
            Op::Rope { .. } => "rope",
            Op::KvWrite { .. } => "kv_write",
            Op::Attention { .. } => "attention",
            Op::Gated { .. } => "gated",
            Op::AddScaled { .. } => "add_scaled",
            Op::SelectRows { .. } => "select_rows",
            Op::ScaleCap { .. } => "scale_cap",
            Op::Tap { .. } => "tap",
        }
    }
}

/// A lowered model.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// In execution order.
    pub ops: Vec<Op>,
    /// Scratch.
    pub buffers: Vec<BufferDecl>,
    /// Canonical names of weights.
    pub weights: Vec<String>,
    /// States that live across steps.
    pub states: Vec<StateDecl>,
}

impl Plan {
    /// Lowers a spec; the spec is validated first.
    pub fn lower(spec: &ModelSpec) -> Result<Plan, ModelError> {
        spec.validate()?;
        let mut b = Builder {
            plan: Plan {
                ops: vec![],
                buffers: vec![],
                weights: vec![],
                states: vec![],
            },
        };
        let hidden = spec.hidden_size;
        let residual = b.buffer("residual", Extent::Tokens, hidden);
        let normed = b.buffer("normed", Extent::Tokens, hidden);
        let branch = b.buffer("branch", Extent::Tokens, hidden);

        let table = b.weight("embed.weight");
        b.push(Op::Embed {
            table,
            scale: spec.embedding.scale,
            out: residual,
        });
        for (i, layer) in spec.layers.iter().enumerate() {
            let p = format!("layers.{i}");
            b.norm(
                residual,
                &format!("{p}.mixer_norm.weight"),
                layer.mixer_norm,
                1,
                normed,
            );
            match &layer.mixer {
                MixerSpec::Attention(a) => {
                    let width = a.heads * a.head_dim;
                    let kv_width = a.kv_heads * a.head_dim;
                    let query = b.buffer("query", Extent::Tokens, width);
                    let key = b.buffer("key", Extent::Tokens, kv_width);
                    let value = b.buffer("value", Extent::Tokens, kv_width);
                    let mixed = b.buffer("mixed", Extent::Tokens, width);
                    let projections = [("q", query), ("k", key), ("v", value)]
                        .map(|(n, out)| b.projection(&format!("{p}.attn.{n}"), a.qkv_bias, out))
                        .into();
                    b.push(Op::Linear {
                        input: normed,
                        projections,
                    });
                    if let Some(norm) = a.qk_norm {
                        b.norm(
                            query,
                            &format!("{p}.attn.q_norm.weight"),
                            norm,
                            a.heads,
                            query,
                        );
                        b.norm(
                            key,
                            &format!("{p}.attn.k_norm.weight"),
                            norm,
                            a.kv_heads,
                            key,
                        );
                    }
                    if let Some(rope) = a.rope {
                        let head_dim = a.head_dim;
                        b.push(Op::Rope {
                            buffer: query,
                            rope,
                            heads: a.heads,
                            head_dim,
                        });
                        b.push(Op::Rope {
                            buffer: key,
                            rope,
                            heads: a.kv_heads,
                            head_dim,
                        });
                    }
                    let state = b.state(StateDecl::Kv {
                        layer: i,
                        kv_heads: a.kv_heads,
                        head_dim: a.head_dim,
                    });
                    b.push(Op::KvWrite { key, value, state });
                    b.push(Op::Attention {
                        query,
                        state,
                        heads: a.heads,
                        scale: a.scale,
                        window: a.window,
                        softcap: a.logit_softcap,
                        out: mixed,
                    });
                    let out = b.projection(&format!("{p}.attn.o"), a.out_bias, branch);
                    b.push(Op::Linear {
                        input: mixed,
                        projections: vec![out],
                    });
                }
            }
            if let Some(norm) = layer.post_mixer_norm {
                b.norm(
                    branch,
                    &format!("{p}.post_mixer_norm.weight"),
                    norm,
                    1,
                    branch,
                );
            }
            b.push(Op::AddScaled {
                accumulator: residual,
                input: branch,
                scale: layer.residual_scale,
            });

            b.norm(
                residual,
                &format!("{p}.ffn_norm.weight"),
                layer.ffn_norm,
                1,
                normed,
            );
            match &layer.ffn {
                FfnSpec::Gated {
                    intermediate_size,
                    activation,
                    bias,
                } => {
                    let gate = b.buffer("gate", Extent::Tokens, *intermediate_size);
                    let up = b.buffer("up", Extent::Tokens, *intermediate_size);
                    let projections = [("gate", gate), ("up", up)]
                        .map(|(n, out)| b.projection(&format!("{p}.ffn.{n}"), *bias, out))
                        .into();
                    b.push(Op::Linear {
                        input: normed,
                        projections,
                    });
                    b.push(Op::Gated {
                        gate,
                        up,
                        activation: *activation,
                        out: gate,
                    });
                    let out = b.projection(&format!("{p}.ffn.down"), *bias, branch);
                    b.push(Op::Linear {
                        input: gate,
                        projections: vec![out],
                    });
                }
            }
            if let Some(norm) = layer.post_ffn_norm {
                b.norm(
                    branch,
                    &format!("{p}.post_ffn_norm.weight"),
                    norm,
                    1,
                    branch,
                );
            }
            b.push(Op::AddScaled {
                accumulator: residual,
                input: branch,
                scale: layer.residual_scale,
            });
            b.push(Op::Tap {
                output: Output::Residual(i),
                buffer: residual,
            });
        }

        let selected = b.buffer("selected", Extent::LogitRows, hidden);
        let final_hidden = b.buffer("final_hidden", Extent::LogitRows, hidden);
        let logits = b.buffer("logits", Extent::LogitRows, spec.vocab_size);
        b.push(Op::SelectRows {
            input: residual,
            out: selected,
        });
        b.norm(
            selected,
            "final_norm.weight",
            spec.final_norm,
            1,
            final_hidden,
        );
        b.push(Op::Tap {
            output: Output::FinalHidden,
            buffer: final_hidden,
        });
        let weight = b.weight(if spec.head.tied {
            "embed.weight"
        } else {
            "head.weight"
        });
        b.push(Op::Linear {
            input: final_hidden,
            projections: vec![Projection {
                weight,
                bias: None,
                out: logits,
            }],
        });
        if spec.head.scale != 1.0 || spec.head.softcap.is_some() {
            b.push(Op::ScaleCap {
                buffer: logits,
                scale: spec.head.scale,
                softcap: spec.head.softcap,
            });
        }
        b.push(Op::Tap {
            output: Output::Logits,
            buffer: logits,
        });
        Ok(b.plan)
    }

    /// Bytes of scratch for a step of `tokens` rows and `logit_rows` logits.
    pub fn scratch_bytes(&self, tokens: usize, logit_rows: usize) -> usize {
        self.buffers
            .iter()
            .map(|b| {
                let rows = match b.rows {
                    Extent::Tokens => tokens,
                    Extent::LogitRows => logit_rows,
                };
                rows.saturating_mul(b.columns * size_of::<f32>())
            })
            .fold(0, usize::saturating_add)
    }

    /// Bytes of all KV states for one token.
    pub fn kv_bytes_per_token(&self, format: KvFormat) -> usize {
        self.states
            .iter()
            .map(|s| match s {
                StateDecl::Kv {
                    kv_heads, head_dim, ..
                } => 2 * kv_heads * head_dim * format.bytes(),
            })
            .sum()
    }
}

struct Builder {
    plan: Plan,
}

impl Builder {
    fn push(&mut self, op: Op) {
        self.plan.ops.push(op);
    }

    /// The buffer of that name and size; layers share them.
    fn buffer(&mut self, name: &'static str, rows: Extent, columns: usize) -> BufferId {
        let decl = BufferDecl {
            name,
            rows,
            columns,
        };
        let found = self.plan.buffers.iter().position(|b| *b == decl);
        BufferId(found.unwrap_or_else(|| {
            self.plan.buffers.push(decl);
            self.plan.buffers.len() - 1
        }))
    }

    fn weight(&mut self, name: &str) -> WeightId {
        let found = self.plan.weights.iter().position(|w| w == name);
        WeightId(found.unwrap_or_else(|| {
            self.plan.weights.push(name.to_owned());
            self.plan.weights.len() - 1
        }))
    }

    fn state(&mut self, decl: StateDecl) -> StateId {
        self.plan.states.push(decl);
        StateId(self.plan.states.len() - 1)
    }

    fn projection(&mut self, prefix: &str, bias: bool, out: BufferId) -> Projection {
        let weight = self.weight(&format!("{prefix}.weight"));
        let bias = bias.then(|| self.weight(&format!("{prefix}.bias")));
        Projection { weight, bias, out }
    }

    fn norm(
        &mut self,
        input: BufferId,
        weight: &str,
        norm: NormSpec,
        groups: usize,
        out: BufferId,
    ) {
        let weight = self.weight(weight);
        self.push(Op::RmsNorm {
            input,
            weight,
            norm,
            groups,
            out,
        });
    }
}

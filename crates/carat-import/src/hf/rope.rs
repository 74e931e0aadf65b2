//! Rotary settings in both dialects: `rope_theta` with `rope_scaling`, and
//! `rope_parameters` (flat, or one object per layer type).

use carat_bundle::spec::{RopeScaling, RopeSpec};
use serde_json::Value;

use super::Config;
use crate::ImportError;

/// Base where a checkpoint names none, as in the first checkpoints of this kind.
const DEFAULT_THETA: f64 = 10_000.0;

/// Rotary embeddings of a checkpoint.
pub(crate) enum Ropes {
    /// One for all layers.
    Uniform(RopeSpec),
    /// One for layers that see everything, one for layers with a window.
    PerLayerType {
        /// `full_attention`.
        full: RopeSpec,
        /// `sliding_attention`.
        sliding: RopeSpec,
    },
}

/// Reads the rotary settings for heads of `head_dim` elements.
pub(crate) fn read_ropes(
    cfg: &Config<'_>,
    head_dim: usize,
    max_context: usize,
) -> Result<Ropes, ImportError> {
    let theta = cfg.number("rope_theta")?;
    let partial = cfg.number("partial_rotary_factor")?;
    let reader = Reader {
        outer: cfg,
        head_dim,
        max_context,
        partial,
    };
    let scaling = cfg.object("rope_scaling")?;
    let Some(parameters) = cfg.object("rope_parameters")? else {
        let local = cfg.number("rope_local_base_freq")?;
        let full = match &scaling {
            Some(s) => reader.rope(s, theta)?,
            None => reader.plain(theta)?,
        };
        return Ok(match local {
            None => Ropes::Uniform(full),
            // Only the layers that see everything are stretched.
            Some(local) => Ropes::PerLayerType {
                full,
                sliding: reader.plain(Some(local))?,
            },
        });
    };
    if parameters.keys().any(|k| k.ends_with("_attention")) {
        let one = |kind: &str| {
            let p = parameters.need(kind, parameters.object(kind)?)?;
            reader.rope(&p, None)
        };
        let ropes = Ropes::PerLayerType {
            full: one("full_attention")?,
            sliding: one("sliding_attention")?,
        };
        parameters.finish()?;
        if theta.is_some() || scaling.is_some() {
            cfg.note("rope_theta and rope_scaling were read from rope_parameters instead");
        }
        return Ok(ropes);
    }
    let rope = reader.rope(&parameters, theta)?;
    // A file may carry both dialects; they must then agree.
    if let Some(theta) = theta
        && theta != rope.theta
    {
        return Err(cfg.error(
            "rope_parameters.rope_theta",
            format!("expected the {theta} of rope_theta, found {}", rope.theta),
        ));
    }
    if let Some(scaling) = &scaling {
        let other = reader.rope(scaling, Some(rope.theta))?;
        if other != rope {
            return Err(cfg.error(
                "rope_parameters",
                "expected the same settings as rope_scaling, found others",
            ));
        }
    }
    Ok(Ropes::Uniform(rope))
}

struct Reader<'a, 'b> {
    outer: &'a Config<'b>,
    head_dim: usize,
    max_context: usize,
    partial: Option<f64>,
}

impl Reader<'_, '_> {
    fn plain(&self, theta: Option<f64>) -> Result<RopeSpec, ImportError> {
        Ok(RopeSpec {
            rotary_dim: self.rotary_dim(self.partial)?,
            theta: theta.unwrap_or(DEFAULT_THETA),
            scaling: RopeScaling::None,
        })
    }

    fn rotary_dim(&self, partial: Option<f64>) -> Result<usize, ImportError> {
        let factor = partial.unwrap_or(1.0);
        if !(factor > 0.0 && factor <= 1.0) {
            return Err(self.outer.error(
                "partial_rotary_factor",
                format!("expected a number above 0 and at most 1, found {factor}"),
            ));
        }
        Ok((self.head_dim as f64 * factor) as usize)
    }

    fn rope(&self, p: &Config<'_>, theta: Option<f64>) -> Result<RopeSpec, ImportError> {
        let kind = p.text("rope_type")?;
        // The older name of the same key; files may carry both.
        let older = p.text("type")?;
        if let (Some(a), Some(b)) = (kind, older)
            && a != b
        {
            return Err(p.error(
                "type",
                format!("expected the {a:?} of rope_type, found {b:?}"),
            ));
        }
        let kind = kind.or(older).unwrap_or("default");
        let theta = p.number("rope_theta")?.or(theta).unwrap_or(DEFAULT_THETA);
        let partial = p.number("partial_rotary_factor")?.or(self.partial);
        let positive = |key: &str, v: Option<f64>| {
            let v = p.need(key, v)?;
            if v.is_finite() && v > 0.0 {
                Ok(v)
            } else {
                Err(p.error(key, format!("expected a positive number, found {v}")))
            }
        };
        let scaling = match kind {
            "default" => {
                // Without a type the factor has no effect, unless it claims one.
                p.only("factor", &[Value::from(1.0), Value::from(1)])?;
                RopeScaling::None
            }
            "linear" => RopeScaling::Linear {
                factor: positive("factor", p.number("factor")?)?,
            },
            "llama3" => RopeScaling::FrequencyBands {
                factor: positive("factor", p.number("factor")?)?,
                low_freq_factor: positive("low_freq_factor", p.number("low_freq_factor")?)?,
                high_freq_factor: positive("high_freq_factor", p.number("high_freq_factor")?)?,
                original_max_context: p.need(
                    "original_max_position_embeddings",
                    p.size("original_max_position_embeddings")?,
                )?,
            },
            "longrope" | "su" => self.longrope(p)?,
            other => {
                return Err(p.error(
                    "rope_type",
                    format!("expected one of default, linear, llama3, longrope, found {other:?}"),
                ));
            }
        };
        p.finish()?;
        Ok(RopeSpec {
            rotary_dim: self.rotary_dim(partial)?,
            theta,
            scaling,
        })
    }

    fn longrope(&self, p: &Config<'_>) -> Result<RopeScaling, ImportError> {
        let outside = self.outer.size("original_max_position_embeddings")?;
        let original = p
            .size("original_max_position_embeddings")?
            .or(outside)
            .unwrap_or(self.max_context);
        let factors = |key: &str| -> Result<Vec<f32>, ImportError> {
            let v = p.need(key, p.numbers(key)?)?;
            Ok(v.into_iter().map(|x| x as f32).collect())
        };
        let ratio = match p.number("factor")? {
            Some(f) => f,
            None => self.max_context as f64 / original.max(1) as f64,
        };
        let attention_factor = match p.number("attention_factor")? {
            Some(f) => f as f32,
            None => longrope_attention_factor(ratio, original),
        };
        Ok(RopeScaling::LongRope {
            short_factors: factors("short_factor")?,
            long_factors: factors("long_factor")?,
            original_max_context: original,
            attention_factor,
        })
    }
}

/// Factor on sine and cosine of a context `ratio` times the original one:
/// `sqrt(1 + ln(ratio) / ln(original))`, 1 where nothing is stretched.
fn longrope_attention_factor(ratio: f64, original: usize) -> f32 {
    if ratio <= 1.0 || original <= 1 {
        1.0
    } else {
        (1.0 + ratio.ln() / (original as f64).ln()).sqrt() as f32
    }
}

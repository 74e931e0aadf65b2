//! The keys of a recipe file. Unknown ones are errors.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Deserializer, de};

/// A recipe file: `quantization_config` or `kmeans_palettization_config`, not both.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RecipeFile {
    /// What only carat knows.
    #[serde(default)]
    pub carat: Settings,
    /// Linear quantization.
    pub quantization_config: Option<QuantizationConfig>,
    /// Palettes.
    pub kmeans_palettization_config: Option<PalettizationConfig>,
}

/// Settings that the recipe files of others do not have.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// What the recipe is for, in words.
    pub description: Option<String>,
    /// Give a model whose head is its embedding table a head of its own.
    #[serde(default)]
    pub untie_head: bool,
    /// How matrices are stored that no configuration quantizes.
    #[serde(default)]
    pub uncompressed: Uncompressed,
    /// Modules (regular expressions) that stay as they are although a
    /// configuration matches them: those whose shape does not fit. Without an
    /// entry here they are errors.
    #[serde(default)]
    pub skip: Vec<String>,
    /// Matrices that already are on the grid that is asked for, to the last bit, keep
    /// their codes and scales, whatever the scheme.
    #[serde(default = "keep_grids")]
    pub keep_grids: bool,
    /// Quantize with a text in view.
    pub calibration: Option<Calibration>,
}

fn keep_grids() -> bool {
    true
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            description: None,
            untie_head: false,
            uncompressed: Uncompressed::default(),
            skip: Vec::new(),
            keep_grids: keep_grids(),
            calibration: None,
        }
    }
}

/// How a text that the model reads decides what becomes of weights.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Calibration {
    /// The text: a file beside the recipe. `--calibration` goes before it.
    pub text: Option<String>,
    /// Tokens of it, from its beginning.
    #[schemars(range(min = 2, max = 1048576))]
    pub tokens: usize,
    /// Tokens that the model reads together.
    #[schemars(range(min = 2, max = 1048576))]
    pub sequence: usize,
    /// How codes are chosen.
    pub rounding: CodeChoice,
    /// GPTQ: what is added to the diagonal, as a part of its mean.
    #[schemars(range(min = 1e-6, max = 1))]
    pub damping: f32,
    /// GPTQ: columns with the largest inputs first.
    pub act_order: bool,
    /// GPTQ: how often, at most, each code is chosen anew given all others.
    #[schemars(range(max = 32))]
    pub sweeps: u8,
    /// Scales of inputs, folded into what makes them.
    pub scales: InputScales,
    /// SmoothQuant: how much of the range goes from inputs to weights.
    #[schemars(range(min = 0, max = 1))]
    pub strength: f32,
}

impl Default for Calibration {
    fn default() -> Self {
        Calibration {
            text: None,
            tokens: 8192,
            sequence: 512,
            rounding: CodeChoice::Nearest,
            damping: 0.01,
            act_order: true,
            sweeps: 0,
            scales: InputScales::None,
            strength: 0.5,
        }
    }
}

/// `rounding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CodeChoice {
    /// The code nearest to the weight.
    Nearest,
    /// The code that makes good the errors of the columns before it.
    Gptq,
}

/// `scales`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InputScales {
    /// None.
    None,
    /// Columns with large inputs get finer steps.
    Awq,
    /// Large inputs are made smaller, for activations in int8.
    Smoothquant,
}

/// What happens to matrices that are not quantized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Uncompressed {
    /// As stored, exactly.
    #[default]
    Keep,
    /// Rounded to fp16.
    Float16,
}

/// `quantization_config`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QuantizationConfig {
    /// How the reference traces a model; carat has no use for it.
    pub execution_mode: Option<ExecutionMode>,
    /// Activations are calibrated by the exporter; must be false.
    #[serde(default)]
    pub calibrate_activations: bool,
    /// Every module without a configuration of its own; `null` leaves them alone.
    pub global_config: Option<QuantizationModule>,
    /// By class of module.
    #[serde(default)]
    pub module_type_configs: Ordered<Option<QuantizationModule>>,
    /// By name of module (regular expression on the whole name); the last match wins.
    #[serde(default)]
    pub module_name_configs: Ordered<Option<QuantizationModule>>,
}

/// `kmeans_palettization_config`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PalettizationConfig {
    /// Every module without a configuration of its own; `null` leaves them alone.
    pub global_config: Option<PalettizationModule>,
    /// By class of module.
    #[serde(default)]
    pub module_type_configs: Ordered<Option<PalettizationModule>>,
    /// By name of module (regular expression on the whole name); the last match wins.
    #[serde(default)]
    pub module_name_configs: Ordered<Option<PalettizationModule>>,
}

/// `execution_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExecutionMode {
    /// Module by module.
    Eager,
    /// The traced graph.
    Graph,
}

/// A module of `quantization_config`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QuantizationModule {
    /// Weights, by their name in the module; `*` is all.
    #[serde(default)]
    pub op_state_spec: Field<Ordered<Option<QuantizationSpec>>>,
    /// Activations that go in. Must be `null`: left out, it turns them to int8.
    #[serde(default)]
    pub op_input_spec: Field<Ordered<Option<QuantizationSpec>>>,
    /// Activations that come out. Must be `null`: left out, it turns them to int8.
    #[serde(default)]
    pub op_output_spec: Field<Ordered<Option<QuantizationSpec>>>,
    /// By type of operation: `linear` or `embedding`.
    #[serde(default)]
    pub op_type_config: Ordered<Option<Op<QuantizationSpec>>>,
    /// By name of operation; must be empty.
    #[serde(default)]
    pub op_name_config: Ordered<Option<Op<QuantizationSpec>>>,
    /// Weights of this very module; goes before `op_state_spec`.
    #[serde(default)]
    pub module_state_spec: Field<Ordered<Option<QuantizationSpec>>>,
    /// Must be empty.
    #[serde(default)]
    pub module_input_spec: Field<Ordered<Option<QuantizationSpec>>>,
    /// Must be empty.
    #[serde(default)]
    pub module_output_spec: Field<Ordered<Option<QuantizationSpec>>>,
}

/// A module of `kmeans_palettization_config`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PalettizationModule {
    /// Weights, by their name in the module; `*` is all.
    #[serde(default)]
    pub op_state_spec: Field<Ordered<Option<PaletteSpec>>>,
    /// Must be empty: palettes are of weights.
    #[serde(default)]
    pub op_input_spec: Field<Ordered<Option<PaletteSpec>>>,
    /// Must be empty: palettes are of weights.
    #[serde(default)]
    pub op_output_spec: Field<Ordered<Option<PaletteSpec>>>,
    /// By type of operation: `linear` or `embedding`.
    #[serde(default)]
    pub op_type_config: Ordered<Option<Op<PaletteSpec>>>,
    /// By name of operation; must be empty.
    #[serde(default)]
    pub op_name_config: Ordered<Option<Op<PaletteSpec>>>,
    /// Weights of this very module; goes before `op_state_spec`.
    #[serde(default)]
    pub module_state_spec: Field<Ordered<Option<PaletteSpec>>>,
    /// Must be empty.
    #[serde(default)]
    pub module_input_spec: Field<Ordered<Option<PaletteSpec>>>,
    /// Must be empty.
    #[serde(default)]
    pub module_output_spec: Field<Ordered<Option<PaletteSpec>>>,
    /// Merge weights that are equal once rounded.
    #[serde(default = "yes")]
    pub enable_fast_kmeans_mode: bool,
    /// Decimals to which the fast mode rounds.
    #[serde(default = "four")]
    #[schemars(range(max = 7))]
    pub rounding_precision: u32,
    /// For training; must be `null`.
    pub pat_schedule: Option<serde_json::Value>,
}

const fn yes() -> bool {
    true
}

const fn four() -> u32 {
    4
}

/// An operation of a module.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Op<W> {
    /// Weights, by their name; `*` is all.
    #[serde(default)]
    pub op_state_spec: Field<Ordered<Option<W>>>,
    /// Activations that go in.
    #[serde(default)]
    pub op_input_spec: Field<Ordered<Option<W>>>,
    /// Activations that come out.
    #[serde(default)]
    pub op_output_spec: Field<Ordered<Option<W>>>,
}

/// How a weight is quantized.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct QuantizationSpec {
    /// What a weight becomes. Unsigned integers are the signed ones of the same
    /// width, moved.
    pub dtype: CodeType,
    /// How the scale follows from the weights.
    pub qscheme: QScheme,
    /// Must be `zp`.
    pub qformulation: QFormulation,
    /// Which weights share a scale.
    pub granularity: QuantizationGranularity,
    /// Must be open: the range is that of the weights.
    pub float_range: Option<[Option<f32>; 2]>,
    /// How a scale is stored; fp16 (for FP4 a power of two) if left out.
    pub scale_dtype: Option<ScaleType>,
    /// Must be `default`.
    pub fake_quantize_cls: Default_,
    /// Weights have one way: `default` and `static` are it.
    pub qparam_calculator_cls: QParams,
    /// `minmax`, or a search for the clipped range of the least squared error.
    pub range_calculator_cls: RangeCalculator,
}

impl Default for QuantizationSpec {
    fn default() -> Self {
        QuantizationSpec {
            dtype: CodeType::Int8,
            qscheme: QScheme::Symmetric,
            qformulation: QFormulation::Zp,
            granularity: QuantizationGranularity::PerTensor { axis: None },
            float_range: None,
            scale_dtype: None,
            fake_quantize_cls: Default_::Default,
            qparam_calculator_cls: QParams::Default,
            range_calculator_cls: RangeCalculator::Minmax,
        }
    }
}

/// `dtype`.
#[allow(missing_docs)] // the names are the formats' own
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
pub enum CodeType {
    #[serde(rename = "int8", alias = "torch.int8")]
    Int8,
    #[serde(rename = "uint8", alias = "torch.uint8")]
    Uint8,
    #[serde(rename = "int4", alias = "torch.int4")]
    Int4,
    #[serde(rename = "uint4", alias = "torch.uint4")]
    Uint4,
    #[serde(rename = "int2", alias = "torch.int2")]
    Int2,
    #[serde(rename = "uint2", alias = "torch.uint2")]
    Uint2,
    /// carat's own: -1, 0 and 1.
    #[serde(rename = "ternary")]
    Ternary,
    #[serde(
        rename = "float4_e2m1fn",
        alias = "float4_e2m1fn_x2",
        alias = "torch.float4_e2m1fn_x2"
    )]
    Fp4,
    #[serde(
        rename = "float8_e4m3fn",
        alias = "float8_e4m3",
        alias = "torch.float8_e4m3fn"
    )]
    Fp8E4M3,
    #[serde(rename = "float8_e5m2", alias = "torch.float8_e5m2")]
    Fp8E5M2,
}

/// `qscheme`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QScheme {
    /// The whole range of codes; the largest weight saturates by half a step.
    Symmetric,
    /// Without the code that has no counterpart; clips no weight, in spite of its name.
    SymmetricWithClipping,
    /// With a zero point.
    Asymmetric,
    /// carat's own: the grid of GGUF's Q4_0 (int4, blocks of 32).
    #[serde(rename = "q4_0")]
    Q4_0,
    /// carat's own: the mean magnitude is one step (ternary).
    Absmean,
}

/// `qformulation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QFormulation {
    /// Integers with a zero point.
    Zp,
    /// A minimum in floating point; not supported.
    Minval,
}

/// `granularity` of a quantization.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum QuantizationGranularity {
    /// One scale.
    PerTensor {
        /// Must be `null`.
        axis: Option<i64>,
    },
    /// One for each row.
    PerChannel {
        /// 0.
        axis: Option<i64>,
    },
    /// One for so many columns of a row.
    PerBlock {
        /// 1, or -1.
        axis: Option<i64>,
        /// Columns, or a list with one entry for each dimension (-1 is all of it).
        block_size: BlockSize,
    },
}

/// `block_size`.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum BlockSize {
    /// Along the axis.
    Columns(i64),
    /// Along every axis.
    Each(Vec<i64>),
}

/// `scale_dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
pub enum ScaleType {
    /// fp16.
    #[serde(rename = "float16", alias = "torch.float16")]
    Float16,
    /// fp32.
    #[serde(rename = "float32", alias = "torch.float32")]
    Float32,
    /// A power of two.
    #[serde(
        rename = "float8_e8m0fnu",
        alias = "float8_e8m0",
        alias = "torch.float8_e8m0fnu"
    )]
    E8M0,
    /// FP8 under one fp32 scale of the tensor: NVFP4, with FP4 in blocks of 16.
    #[serde(rename = "float8_e4m3fn", alias = "torch.float8_e4m3fn")]
    E4M3,
}

/// A key with one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Default_ {
    /// The one.
    Default,
}

/// `qparam_calculator_cls`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QParams {
    /// From the weights.
    Default,
    /// The same.
    Static,
    /// For activations only.
    MovingAverage,
    /// From all samples; of weights there is one.
    GlobalMinmax,
    /// For activations only.
    Dynamic,
}

/// `range_calculator_cls`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RangeCalculator {
    /// The whole range.
    Minmax,
    /// carat's own: the part of it, down to 0.7, with the least squared error.
    Mse,
}

/// How a weight is palettized.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PaletteSpec {
    /// Bits of an index: 1, 2, 3, 4, 6 or 8.
    pub n_bits: u8,
    /// Which weights share a palette.
    pub granularity: PaletteGranularity,
    /// Must be `null`: tables are fp16.
    pub lut_qspec: Option<QuantizationSpec>,
    /// Must be 1: entries are single values.
    pub cluster_dim: u32,
    /// Divide each row by its largest magnitude first.
    pub enable_per_channel_scale: bool,
    /// For training; must be `null`.
    pub training_strategy_spec: Option<serde_json::Value>,
}

impl Default for PaletteSpec {
    fn default() -> Self {
        PaletteSpec {
            n_bits: 4,
            granularity: PaletteGranularity::PerTensor { axis: None },
            lut_qspec: None,
            cluster_dim: 1,
            enable_per_channel_scale: false,
            training_strategy_spec: None,
        }
    }
}

/// `granularity` of a palette.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum PaletteGranularity {
    /// One palette.
    PerTensor {
        /// Must be `null`.
        axis: Option<i64>,
    },
    /// One for so many whole rows.
    PerGroupedChannel {
        /// 0.
        axis: Option<i64>,
        /// Rows.
        group_size: u32,
    },
}

/// A key that means one thing left out and another thing `null`.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Field<T> {
    /// Left out.
    #[default]
    Omitted,
    /// `null`.
    Null,
    /// Given.
    Given(T),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Field<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match Option::deserialize(deserializer)? {
            Some(value) => Field::Given(value),
            None => Field::Null,
        })
    }
}

impl<T: JsonSchema> JsonSchema for Field<T> {
    fn schema_name() -> Cow<'static, str> {
        Option::<T>::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        Option::<T>::json_schema(generator)
    }

    fn inline_schema() -> bool {
        true
    }
}

/// A map in the order in which it was written; `null` is an empty one.
#[derive(Clone, Debug, PartialEq)]
pub struct Ordered<T>(pub Vec<(String, T)>);

impl<T> Default for Ordered<T> {
    fn default() -> Self {
        Ordered(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Ordered<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> de::Visitor<'de> for Visitor<T> {
            type Value = Ordered<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a map")
            }

            fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
                Ok(Ordered::default())
            }

            fn visit_none<E: de::Error>(self) -> Result<Self::Value, E> {
                Ok(Ordered::default())
            }

            fn visit_some<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
                d.deserialize_map(self)
            }

            fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut out = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    out.push(entry);
                }
                Ok(Ordered(out))
            }
        }
        deserializer.deserialize_option(Visitor(std::marker::PhantomData))
    }
}

impl<T: JsonSchema> JsonSchema for Ordered<T> {
    fn schema_name() -> Cow<'static, str> {
        format!("Map_of_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let value = generator.subschema_for::<T>();
        schemars::json_schema!({ "type": ["object", "null"], "additionalProperties": value })
    }

    fn inline_schema() -> bool {
        true
    }
}

//! From a recipe to a plan: what happens to each tensor of a model.

use carat_bundle::{
    manifest::is_matrix,
    spec::{ModelSpec, TensorDecl, TensorRole},
};
use carat_tensor::grid::{Code, Scale, Spread};
use regex::Regex;

use super::{
    Recipe, activations_off, alias,
    schema::{
        BlockSize, CodeType, Field, Op, Ordered, PaletteGranularity, PaletteSpec,
        PalettizationModule, QFormulation, QParams, QScheme, QuantizationGranularity,
        QuantizationModule, QuantizationSpec, RangeCalculator, ScaleType, Uncompressed,
    },
};
use crate::{
    QuantError,
    linear::{Linear, RangeSearch, Scheme},
    matrix::Method,
};

/// What happens to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// It is stored as its source stores it.
    Keep,
    /// It is rounded to fp16.
    Float16,
    /// It is quantized.
    Quantize(Method),
}

impl std::fmt::Display for Treatment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Treatment::Keep => f.write_str("as stored"),
            Treatment::Float16 => f.write_str("F16"),
            Treatment::Quantize(method) => {
                write!(f, "{}", method.grid())?;
                match method {
                    Method::Linear { linear, .. } => {
                        write!(f, " {}", linear.scheme.name())?;
                        if linear.search == RangeSearch::Mse {
                            f.write_str(", clipped for least squared error")?;
                        }
                        Ok(())
                    }
                    Method::Palette { .. } => f.write_str(" k-means"),
                }
            }
        }
    }
}

impl Scheme {
    /// The name, as in recipes.
    pub const fn name(self) -> &'static str {
        match self {
            Scheme::Symmetric => "symmetric",
            Scheme::SymmetricWithClipping => "symmetric_with_clipping",
            Scheme::Asymmetric => "asymmetric",
            Scheme::Q4_0 => "q4_0",
            Scheme::AbsMean => "absmean",
        }
    }
}

/// A tensor and what happens to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// The tensor.
    pub decl: TensorDecl,
    /// What happens to it.
    pub treatment: Treatment,
    /// The rule that decided it, such as `module_name_configs: lm_head`.
    pub rule: String,
}

/// A recipe for one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Name of the recipe.
    pub recipe: String,
    /// The model's tensors in its own order, a new head among them.
    pub tensors: Vec<Planned>,
    /// The model's head was its embedding table and becomes a tensor of its own.
    pub untied_head: bool,
    /// Matrices that a rule matched and that stay as they are, with the reason.
    pub skipped: Vec<(String, String)>,
    /// Rules that match nothing in this model.
    pub unmatched: Vec<String>,
}

impl Plan {
    /// Whether anything in it compares errors: clip searches and palettes, which
    /// importance of columns changes.
    pub fn compares_errors(&self) -> bool {
        self.tensors.iter().any(|t| match t.treatment {
            Treatment::Quantize(Method::Palette { .. }) => true,
            Treatment::Quantize(Method::Linear { linear, .. }) => linear.search == RangeSearch::Mse,
            _ => false,
        })
    }
}

/// Which modules a rule is for.
enum Target {
    /// Those with such a name.
    Name(Regex),
    /// Those of such a class.
    Class(&'static [TensorRole]),
    /// All.
    All,
}

/// One configuration, compiled.
pub(crate) struct Rule {
    key: String,
    target: Target,
    /// For linear layers and embeddings.
    linear: Option<Method>,
    embedding: Option<Method>,
    /// Whether the rule's settings are for the module itself and not its children.
    itself: Option<Option<Method>>,
}

const LINEAR: &[TensorRole] = &[TensorRole::Linear, TensorRole::Head];
const EMBEDDING: &[TensorRole] = &[TensorRole::Embedding];

impl Recipe {
    /// What the recipe makes of a model's tensors.
    ///
    /// # Errors
    ///
    /// [`QuantError::Tensor`] when a tensor's shape does not fit what is asked for
    /// and `carat.skip` does not name it.
    pub fn resolve(&self, spec: &ModelSpec) -> Result<Plan, QuantError> {
        let rules = self.rules()?;
        let skip = self.patterns()?;
        let mut used = vec![false; rules.len()];
        let mut decide = |decl: &TensorDecl| {
            let names = alias::names(&decl.name);
            let found = rules
                .iter()
                .enumerate()
                .find_map(|(i, rule)| Some((i, rule.for_module(&names, decl.role)?)));
            for (rule, used) in rules.iter().zip(&mut used) {
                *used |= rule.for_module(&names, decl.role).is_some();
            }
            match found {
                Some((i, method)) => (method, rules[i].key.clone()),
                None => (None, "no rule".to_owned()),
            }
        };

        let mut spec = spec.clone();
        let untied_head = spec.head.tied && {
            let mut head = spec.tensors()[0].clone();
            let (of_table, _) = decide(&head);
            "head.weight".clone_into(&mut head.name);
            head.role = TensorRole::Head;
            let (of_head, rule) = decide(&head);
            self.file.carat.untie_head
                || of_head != of_table && rule.starts_with("module_name_configs")
        };
        spec.head.tied &= !untied_head;

        let mut plan = Plan {
            recipe: self.name.clone(),
            tensors: vec![],
            untied_head,
            skipped: vec![],
            unmatched: vec![],
        };
        for decl in spec.tensors() {
            if !is_matrix(decl.role) {
                plan.tensors.push(Planned {
                    decl,
                    treatment: Treatment::Keep,
                    rule: "vectors are never quantized".into(),
                });
                continue;
            }
            let (method, rule) = decide(&decl);
            let mut treatment = match (method, self.file.carat.uncompressed) {
                (Some(method), _) => Treatment::Quantize(method),
                (None, Uncompressed::Keep) => Treatment::Keep,
                (None, Uncompressed::Float16) => Treatment::Float16,
            };
            if let Treatment::Quantize(method) = treatment
                && let Err(problem) = fits(&method, &decl)
            {
                let names = alias::names(&decl.name);
                if !skip.iter().any(|p| matches(p, &names)) {
                    return Err(QuantError::Tensor {
                        name: self.name.clone(),
                        tensor: decl.name,
                        problem: format!(
                            "{problem}; name its module in carat.skip to store it as it is"
                        ),
                    });
                }
                plan.skipped.push((decl.name.clone(), problem));
                treatment = Treatment::Keep;
            }
            plan.tensors.push(Planned {
                decl,
                treatment,
                rule,
            });
        }
        plan.unmatched = rules
            .iter()
            .zip(used)
            .filter(|(rule, used)| !used && !matches!(rule.target, Target::All))
            .map(|(rule, _)| rule.key.clone())
            .collect();
        Ok(plan)
    }

    /// `carat.skip`.
    fn patterns(&self) -> Result<Vec<Regex>, QuantError> {
        let skip = self.file.carat.skip.iter();
        skip.map(|p| pattern(p).map_err(|e| self.fault("carat.skip", e)))
            .collect()
    }

    /// All rules, the one that goes before the others first.
    pub(crate) fn rules(&self) -> Result<Vec<Rule>, QuantError> {
        self.patterns()?;
        if let Some(config) = &self.file.quantization_config {
            return self.compile(
                config.global_config.as_ref(),
                &config.module_type_configs,
                &config.module_name_configs,
            );
        }
        match &self.file.kmeans_palettization_config {
            Some(config) => self.compile(
                config.global_config.as_ref(),
                &config.module_type_configs,
                &config.module_name_configs,
            ),
            None => Ok(vec![]),
        }
    }

    fn compile<M: Module>(
        &self,
        global: Option<&M>,
        types: &Ordered<Option<M>>,
        names: &Ordered<Option<M>>,
    ) -> Result<Vec<Rule>, QuantError> {
        let fault = |key: &str| {
            let key = key.to_owned();
            move |(inner, problem): (String, String)| {
                let key = if inner.is_empty() {
                    key
                } else {
                    format!("{key}.{inner}")
                };
                self.fault(key, problem)
            }
        };
        let rule = |key: String, target, module: Option<&M>| {
            let mut rule = Rule {
                key,
                target,
                linear: None,
                embedding: None,
                itself: None,
            };
            if let Some(module) = module {
                let found = module.methods().map_err(fault(&rule.key))?;
                (rule.linear, rule.embedding, rule.itself) = found;
            }
            Ok(rule)
        };
        let mut rules = Vec::new();
        for (name, module) in names.0.iter().rev() {
            let key = format!("module_name_configs: {name}");
            let regex = pattern(name).map_err(|e| self.fault(&key, e))?;
            rules.push(rule(key, Target::Name(regex), module.as_ref())?);
        }
        for (class, module) in types.0.iter().rev() {
            let key = format!("module_type_configs: {class}");
            let roles = match class.rsplit('.').next() {
                Some("Linear") => LINEAR,
                Some("Embedding") => EMBEDDING,
                // Norms, rotary embeddings and attention are never quantized.
                _ if module.is_none() => &[],
                _ => {
                    return Err(self.fault(
                        key,
                        "carat quantizes the weights of Linear and Embedding; expected null",
                    ));
                }
            };
            rules.push(rule(key, Target::Class(roles), module.as_ref())?);
        }
        rules.push(rule("global_config".into(), Target::All, global)?);
        Ok(rules)
    }
}

impl Rule {
    /// What the rule says of a module; `None` if it says nothing.
    fn for_module(&self, names: &[String], role: TensorRole) -> Option<Option<Method>> {
        let itself = match &self.target {
            Target::Name(regex) => {
                if !matches(regex, names) {
                    return None;
                }
                names.iter().any(|name| regex.is_match(name))
            }
            Target::Class(roles) => {
                if !roles.contains(&role) {
                    return None;
                }
                true
            }
            Target::All => false,
        };
        match self.itself {
            Some(method) if itself => Some(method),
            _ if role == TensorRole::Embedding => Some(self.embedding),
            _ => Some(self.linear),
        }
    }
}

/// Whether a pattern matches one of a module's names or of its parents'.
fn matches(regex: &Regex, names: &[String]) -> bool {
    names
        .iter()
        .flat_map(|name| alias::with_parents(name))
        .any(|name| regex.is_match(name))
}

/// A pattern for whole names.
fn pattern(text: &str) -> Result<Regex, String> {
    Regex::new(&format!(r"\A(?:{text})\z")).map_err(|e| format!("{text:?} is no pattern: {e}"))
}

/// Whether a tensor's shape is whole groups.
fn fits(method: &Method, decl: &TensorDecl) -> Result<(), String> {
    let [rows, columns] = *decl.shape.dims() else {
        return Err(format!("{} is not a matrix", decl.shape));
    };
    method
        .grid()
        .parts(rows, columns)
        .map(drop)
        .map_err(|e| e.to_string())
}

type Methods = (Option<Method>, Option<Method>, Option<Option<Method>>);
/// A key below the rule, and what is wrong with it.
type Fault = (String, String);

/// A configuration of either kind.
trait Module {
    /// Methods for linear layers, for embeddings, and for the module itself.
    fn methods(&self) -> Result<Methods, Fault>;
}

/// What a map of specs says of `weight`: nothing, off, or a spec.
fn weight<W>(specs: &Field<Ordered<Option<W>>>) -> Option<Option<&W>> {
    let specs = match specs {
        Field::Omitted => return None,
        Field::Null => return Some(None),
        Field::Given(specs) => &specs.0,
    };
    ["weight", "*"].iter().find_map(|wanted| {
        let spec = specs.iter().find(|(name, _)| name == wanted)?;
        Some(spec.1.as_ref())
    })
}

/// Resolves operations: by type, else the module's own weights, else the default.
fn methods<W: Clone>(
    own: &Field<Ordered<Option<W>>>,
    types: &Ordered<Option<Op<W>>>,
    itself: &Field<Ordered<Option<W>>>,
    default: &W,
    method: impl Fn(&W) -> Result<Method, Fault>,
) -> Result<Methods, Fault> {
    for (name, _) in &types.0 {
        if !matches!(name.as_str(), "linear" | "embedding") {
            return Err((
                format!("op_type_config.{name}"),
                "expected linear or embedding".into(),
            ));
        }
    }
    let of_spec = |key: &str, spec: Option<Option<&W>>| match spec {
        // A map that does not name the weight has no opinion: it stays as it is.
        None => Ok(None),
        Some(spec) => spec
            .map(&method)
            .transpose()
            .map_err(|(inner, problem)| (format!("{key}.weight.{inner}"), problem)),
    };
    let of_op = |op: &str| {
        let typed = types.0.iter().rev().find(|(name, _)| name == op);
        match (typed, own) {
            (Some((_, None)), _) => Ok(None),
            (Some((name, Some(op))), _) => match &op.op_state_spec {
                Field::Omitted => method(default).map(Some),
                spec => of_spec(
                    &format!("op_type_config.{name}.op_state_spec"),
                    weight(spec),
                ),
            },
            (None, Field::Omitted) => method(default).map(Some),
            (None, spec) => of_spec("op_state_spec", weight(spec)),
        }
    };
    let itself = match weight(itself) {
        None => None,
        spec => Some(of_spec("module_state_spec", spec)?),
    };
    Ok((of_op("linear")?, of_op("embedding")?, itself))
}

impl Module for QuantizationModule {
    fn methods(&self) -> Result<Methods, Fault> {
        activations_off("op_input_spec", &self.op_input_spec, true)?;
        activations_off("op_output_spec", &self.op_output_spec, true)?;
        activations_off("module_input_spec", &self.module_input_spec, false)?;
        activations_off("module_output_spec", &self.module_output_spec, false)?;
        for (name, op) in &self.op_type_config.0 {
            for (key, spec) in op.iter().flat_map(Op::inputs_and_outputs) {
                activations_off(&format!("op_type_config.{name}.{key}"), spec, true)?;
            }
        }
        no_op_names(&self.op_name_config)?;
        // What the reference quantizes weights to where a recipe says nothing.
        let default = QuantizationSpec {
            granularity: QuantizationGranularity::PerChannel { axis: None },
            ..QuantizationSpec::default()
        };
        methods(
            &self.op_state_spec,
            &self.op_type_config,
            &self.module_state_spec,
            &default,
            linear,
        )
    }
}

impl Module for PalettizationModule {
    fn methods(&self) -> Result<Methods, Fault> {
        let mut activations = vec![
            ("op_input_spec", &self.op_input_spec),
            ("op_output_spec", &self.op_output_spec),
            ("module_input_spec", &self.module_input_spec),
            ("module_output_spec", &self.module_output_spec),
        ];
        for (_, op) in &self.op_type_config.0 {
            activations.extend(op.iter().flat_map(Op::inputs_and_outputs));
        }
        for (key, spec) in activations {
            if matches!(spec, Field::Given(map) if map.0.iter().any(|(_, s)| s.is_some())) {
                return Err((key.into(), "palettes are of weights: expected null".into()));
            }
        }
        no_op_names(&self.op_name_config)?;
        if self.pat_schedule.is_some() {
            return Err((
                "pat_schedule".into(),
                "is for training: expected null".into(),
            ));
        }
        if self.rounding_precision > 7 {
            return Err((
                "rounding_precision".into(),
                format!("expected at most 7, found {}", self.rounding_precision),
            ));
        }
        let decimals = self
            .enable_fast_kmeans_mode
            .then_some(self.rounding_precision);
        methods(
            &self.op_state_spec,
            &self.op_type_config,
            &self.module_state_spec,
            &PaletteSpec::default(),
            |spec| palette(spec, decimals),
        )
    }
}

fn no_op_names<W>(names: &Ordered<Option<Op<W>>>) -> Result<(), Fault> {
    match names.0.first() {
        None => Ok(()),
        Some((name, _)) => Err((
            format!("op_name_config.{name}"),
            "names of traced operations mean nothing here; use module_name_configs".into(),
        )),
    }
}

fn expected(key: &str, expected: &str, found: impl std::fmt::Debug) -> Fault {
    (key.into(), format!("expected {expected}, found {found:?}"))
}

/// A linear method from its spec.
fn linear(spec: &QuantizationSpec) -> Result<Method, Fault> {
    if spec.qformulation != QFormulation::Zp {
        return Err(expected("qformulation", "zp", spec.qformulation));
    }
    if spec.float_range.is_some_and(|range| range != [None, None]) {
        return Err(expected("float_range", "[null, null]", spec.float_range));
    }
    if matches!(
        spec.qparam_calculator_cls,
        QParams::MovingAverage | QParams::Dynamic
    ) {
        return Err(expected(
            "qparam_calculator_cls",
            "default or static for weights",
            spec.qparam_calculator_cls,
        ));
    }
    let (code, unsigned) = match spec.dtype {
        CodeType::Int8 => (Code::Int(8), false),
        CodeType::Uint8 => (Code::Int(8), true),
        CodeType::Int4 => (Code::Int(4), false),
        CodeType::Uint4 => (Code::Int(4), true),
        CodeType::Int2 => (Code::Int(2), false),
        CodeType::Uint2 => (Code::Int(2), true),
        CodeType::Ternary => (Code::Trit, false),
        CodeType::Fp4 => (Code::Fp4, false),
        CodeType::Fp8E4M3 => (Code::Fp8E4M3, false),
        CodeType::Fp8E5M2 => (Code::Fp8E5M2, false),
    };
    let integer = matches!(code, Code::Int(_));
    let spread = spread(&spec.granularity)?;
    let scheme = match spec.qscheme {
        // Unsigned codes have none without a counterpart to leave out.
        QScheme::SymmetricWithClipping if unsigned => Scheme::Symmetric,
        QScheme::Symmetric if code != Code::Trit => Scheme::Symmetric,
        QScheme::SymmetricWithClipping if integer || code == Code::Trit => {
            Scheme::SymmetricWithClipping
        }
        QScheme::Asymmetric if integer => Scheme::Asymmetric,
        QScheme::Absmean if code == Code::Trit => Scheme::AbsMean,
        QScheme::Q4_0 if code == Code::Int(4) && !unsigned && spread == Spread::Block(32) => {
            Scheme::Q4_0
        }
        other => {
            let fit = match code {
                Code::Trit => "absmean or symmetric_with_clipping for ternary",
                Code::Int(_) => {
                    "symmetric, symmetric_with_clipping or asymmetric (q4_0 is for int4 in blocks of 32)"
                }
                _ => "symmetric for floats",
            };
            return Err(expected("qscheme", fit, other));
        }
    };
    let scale = match (spec.scale_dtype, code) {
        (None, Code::Fp4) | (Some(ScaleType::E8M0), _) => Scale::E8M0,
        (None | Some(ScaleType::Float16), _) => Scale::F16,
        (Some(ScaleType::Float32), _) => Scale::F32,
        (Some(ScaleType::E4M3), _) => Scale::E4M3,
    };
    let search = match spec.range_calculator_cls {
        RangeCalculator::Minmax => RangeSearch::MinMax,
        RangeCalculator::Mse => RangeSearch::Mse,
    };
    let method = Method::Linear {
        linear: Linear {
            code,
            scheme,
            scale,
            search,
        },
        spread,
    };
    if !method.grid().is_valid() {
        return Err(expected(
            "scale_dtype",
            "float16 or float32 for integers, a power of two for floats, FP8 for FP4",
            spec.scale_dtype,
        ));
    }
    if spread == Spread::Tensor && search == RangeSearch::Mse {
        return Err(expected(
            "range_calculator_cls",
            "minmax where the whole tensor shares a scale",
            spec.range_calculator_cls,
        ));
    }
    Ok(method)
}

fn spread(granularity: &QuantizationGranularity) -> Result<Spread, Fault> {
    let columns = |n: i64| {
        u16::try_from(n)
            .ok()
            .filter(|n| *n > 0)
            .map(Spread::Block)
            .ok_or_else(|| expected("granularity.block_size", "1 to 65535 columns", n))
    };
    match granularity {
        QuantizationGranularity::PerTensor { axis: None } => Ok(Spread::Tensor),
        QuantizationGranularity::PerTensor { axis } => {
            Err(expected("granularity.axis", "null", axis))
        }
        QuantizationGranularity::PerChannel {
            axis: None | Some(0),
        } => Ok(Spread::Channel),
        QuantizationGranularity::PerChannel { axis } => Err(expected(
            "granularity.axis",
            "0 (rows of a weight are its outputs)",
            axis,
        )),
        QuantizationGranularity::PerBlock {
            axis: None | Some(1 | -1),
            block_size: BlockSize::Columns(-1),
        } => Ok(Spread::Channel),
        QuantizationGranularity::PerBlock {
            axis: None | Some(1 | -1),
            block_size: BlockSize::Columns(n),
        } => columns(*n),
        QuantizationGranularity::PerBlock {
            axis: None | Some(1 | -1),
            block_size: BlockSize::Each(each),
        } => match each.split_last() {
            Some((-1, rows)) if rows.iter().all(|n| *n == 1) => Ok(Spread::Channel),
            Some((-1, rows)) if rows.iter().all(|n| *n == -1) => Ok(Spread::Tensor),
            Some((n, rows)) if rows.iter().all(|n| *n == 1) => columns(*n),
            _ => Err(expected(
                "granularity.block_size",
                "1 for all dimensions but the last",
                each,
            )),
        },
        QuantizationGranularity::PerBlock { axis, .. } => Err(expected(
            "granularity.axis",
            "1 (blocks lie along the inputs)",
            axis,
        )),
    }
}

/// A palette from its spec.
fn palette(spec: &PaletteSpec, decimals: Option<u32>) -> Result<Method, Fault> {
    if spec.lut_qspec.is_some() {
        return Err(("lut_qspec".into(), "tables are fp16: expected null".into()));
    }
    if spec.cluster_dim != 1 {
        return Err(expected("cluster_dim", "1", spec.cluster_dim));
    }
    if spec.training_strategy_spec.is_some() {
        let problem = "is for training: expected null";
        return Err(("training_strategy_spec".into(), problem.into()));
    }
    let spread = match spec.granularity {
        PaletteGranularity::PerTensor { axis: None } => Spread::Tensor,
        PaletteGranularity::PerTensor { axis } => {
            return Err(expected("granularity.axis", "null", axis));
        }
        PaletteGranularity::PerGroupedChannel {
            axis: None | Some(0),
            group_size,
        } => match u16::try_from(group_size) {
            Ok(rows) if rows > 0 => Spread::Rows(rows),
            _ => {
                return Err(expected(
                    "granularity.group_size",
                    "1 to 65535 rows",
                    group_size,
                ));
            }
        },
        PaletteGranularity::PerGroupedChannel { axis, .. } => {
            return Err(expected("granularity.axis", "0", axis));
        }
    };
    let method = Method::Palette {
        bits: spec.n_bits,
        spread,
        scaled: spec.enable_per_channel_scale,
        decimals,
    };
    if !method.grid().is_valid() {
        return Err(expected("n_bits", "1, 2, 3, 4, 6 or 8", spec.n_bits));
    }
    Ok(method)
}

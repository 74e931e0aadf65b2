//! Which parts of a model suffer most from fewer bits.
//!
//! Each part is damaged alone, and each layer and kind of module is left out of a
//! model that is damaged everywhere: errors add up along the residual stream, so the
//! two need not agree. What is measured goes to a file line by line, and the same
//! scan goes on where it was interrupted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use carat_bundle::manifest::is_matrix;
use carat_bundle::source::{Picked, TensorSource};
use carat_bundle::spec::ModelSpec;
use carat_oracle::Oracle;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::baseline::{Baseline, Harm};
use crate::journal::{self, Journal, Rules};
use crate::{FidelityError, report};

/// `schema` of a scan.
pub const SCAN_SCHEMA: &str = "carat.scan";
/// Its version.
pub const SCAN_VERSION: u32 = 1;

/// First line of a scan: everything that its figures depend on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Always `carat.scan`.
    #[schemars(extend("const" = SCAN_SCHEMA))]
    pub schema: String,
    /// Version of the format, 1.
    #[schemars(extend("const" = SCAN_VERSION))]
    pub version: u32,
    /// Name of the model.
    pub model: String,
    /// BLAKE3 of its files.
    pub source_digest: Option<String>,
    /// How weights are damaged: formats that differ in the width of codes only.
    pub method: String,
    /// Widths of codes.
    pub bits: Vec<u8>,
    /// BLAKE3 of the tokens and the positions asked about.
    pub probe_digest: String,
    /// Positions.
    pub positions: usize,
    /// Positions above the margin floor.
    pub clear: usize,
}

/// What is damaged, or left out of the damage.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// One matrix, such as `layers.3.attn.q`.
    Matrix,
    /// A layer's matrices, such as `layers.3`.
    Layer,
    /// One module of all layers, such as `attn.q`.
    Module,
    /// All matrices.
    Model,
}

/// Whether a unit is damaged alone or alone spared.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Only this unit is damaged.
    Alone,
    /// All but this unit is.
    AllBut,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// Kind of the unit.
    pub part: Part,
    /// Its name.
    pub unit: String,
    /// Bits of a code.
    pub bits: u8,
    /// What was damaged.
    pub mode: Mode,
    /// How far that takes the distributions.
    pub harm: Harm,
}

/// Tensors that are damaged together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Kind.
    pub part: Part,
    /// Name.
    pub name: String,
    /// Names of the tensors.
    pub tensors: BTreeSet<String>,
}

/// All units of a model: the whole, layers, modules, matrices.
pub fn units(spec: &ModelSpec) -> Vec<Unit> {
    let mut found: BTreeMap<(Part, String), BTreeSet<String>> = BTreeMap::new();
    let mut order = Vec::new();
    let mut add = |part, name: &str, tensor: &str| {
        let key = (part, name.to_owned());
        if !found.contains_key(&key) {
            order.push(key.clone());
        }
        found.entry(key).or_default().insert(tensor.to_owned());
    };
    for decl in spec.tensors().into_iter().filter(|d| is_matrix(d.role)) {
        let name = decl.name.strip_suffix(".weight").unwrap_or(&decl.name);
        add(Part::Model, "model", &decl.name);
        add(Part::Matrix, name, &decl.name);
        if let Some((layer, module)) = in_layer(name) {
            add(Part::Layer, &format!("layers.{layer}"), &decl.name);
            add(Part::Module, module, &decl.name);
        }
    }
    order
        .into_iter()
        .filter_map(|key| {
            let tensors = found.remove(&key)?;
            let (part, name) = key;
            Some(Unit {
                part,
                name,
                tensors,
            })
        })
        .collect()
}

/// `layers.3.attn.q` as 3 and `attn.q`.
pub(crate) fn in_layer(name: &str) -> Option<(usize, &str)> {
    let (layer, module) = name.strip_prefix("layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, module))
}

/// A scan so far, on disk as it grows.
#[derive(Debug)]
pub struct Scan {
    /// What it is of.
    pub header: Header,
    /// In the order they came.
    pub lines: Vec<Line>,
    file: Option<Journal>,
}

const RULES: Rules<Header, Line> = Rules {
    header: |h| match (h.schema.as_str(), h.version) {
        (SCAN_SCHEMA, SCAN_VERSION) => Ok(()),
        _ => Err(format!(
            "schema {} version {}, expected {SCAN_SCHEMA} version {SCAN_VERSION}",
            h.schema, h.version
        )),
    },
    item: |header, lines, line| {
        let harm = &line.harm;
        let numbers = [harm.kl, harm.kl_max];
        if !header.bits.contains(&line.bits) {
            return Err(format!("{} bits are not of this scan", line.bits));
        }
        if numbers.iter().any(|v| !v.is_finite() || *v < 0.0) {
            return Err(format!("{}: a divergence of {}", line.unit, harm.kl));
        }
        match lines.iter().any(|l| l.key() == line.key()) {
            true => Err(format!("{} comes twice", line.unit)),
            false => Ok(()),
        }
    },
};

impl Line {
    fn key(&self) -> (Part, &str, u8, Mode) {
        (self.part, &self.unit, self.bits, self.mode)
    }
}

impl Scan {
    /// Opens a file to go on with a scan, or begins one.
    ///
    /// # Errors
    /// Where the file is of another scan, or cannot be read or written.
    pub fn resume(path: &Path, header: Header) -> Result<Scan, FidelityError> {
        let before = journal::before(path, &RULES)?;
        if let Some(found) = before.header.as_ref().filter(|h| **h != header) {
            let fields = |h: &Header| serde_json::to_value(h).unwrap_or_default();
            let (found, wanted) = (fields(found), fields(&header));
            let differs = |(key, value): (&String, &serde_json::Value)| {
                let other = &wanted[key];
                (value != other).then(|| format!("{key} is {value}, expected {other}"))
            };
            let problem = found.as_object().into_iter().flatten().find_map(differs);
            let problem = problem.unwrap_or_else(|| "a header of other fields".into());
            let problem = format!("holds another scan: {problem}");
            return Err(FidelityError::malformed(
                path.display().to_string(),
                problem,
            ));
        }
        let file = Some(Journal::resume(path, &before, &header)?);
        Ok(Scan {
            header,
            lines: before.items,
            file,
        })
    }

    /// Reads a file, finished or not.
    ///
    /// # Errors
    /// Where it is no scan.
    pub fn read(path: &Path) -> Result<Scan, FidelityError> {
        let missing = || FidelityError::malformed(path.display().to_string(), "has no header");
        let found = journal::read(path, true, &RULES)?;
        Ok(Scan {
            header: found.header.ok_or_else(missing)?,
            lines: found.items,
            file: None,
        })
    }

    /// A measurement, if it was made.
    pub fn find(&self, part: Part, unit: &str, bits: u8, mode: Mode) -> Option<&Line> {
        let key = (part, unit, bits, mode);
        self.lines.iter().find(|l| l.key() == key)
    }

    /// Measures what is missing at one width: `damaged` is `source` with every matrix at
    /// that width, and `each` is told of every measurement; when it says false the scan
    /// ends early. Matrices are damaged alone; layers and modules are left out besides.
    /// Gives whether everything is there.
    ///
    /// # Errors
    /// Where weights cannot be read or a line cannot be written.
    pub fn run(
        &mut self,
        baseline: &Baseline<'_, '_>,
        (source, damaged): (&dyn TensorSource, &dyn TensorSource),
        (bits, units): (u8, &[Unit]),
        each: &mut dyn FnMut(&Line) -> bool,
    ) -> Result<bool, FidelityError> {
        let all = units.iter().flat_map(|u| u.tensors.iter().cloned());
        let all: BTreeSet<String> = all.collect();
        // Kept between the units that are left out: most of it is the same each time.
        let mut everywhere: Option<Oracle<'_>> = None;
        for mode in [Mode::Alone, Mode::AllBut] {
            for unit in units {
                let apart = matches!(unit.part, Part::Layer | Part::Module);
                let known = self.find(unit.part, &unit.name, bits, mode).is_some();
                if known || mode == Mode::AllBut && !apart {
                    continue;
                }
                let of_unit = |name: &str| unit.tensors.contains(name);
                let picked = |source, other| Picked {
                    source,
                    other,
                    picks: &of_unit,
                };
                let harm = match mode {
                    Mode::Alone => {
                        let picked = picked(source, damaged);
                        let candidate = baseline.oracle().on(&picked, &of_unit)?;
                        baseline.harm(&candidate, &unit.tensors)?
                    }
                    Mode::AllBut => {
                        let everywhere = match &mut everywhere {
                            Some(oracle) => oracle,
                            empty => empty.insert(baseline.oracle().on(damaged, &|_| true)?),
                        };
                        let picked = picked(damaged, source);
                        let candidate = everywhere.on(&picked, &of_unit)?;
                        baseline.harm(&candidate, &all)?
                    }
                };
                let line = Line {
                    part: unit.part,
                    unit: unit.name.clone(),
                    bits,
                    mode,
                    harm,
                };
                if let Some(file) = &mut self.file {
                    file.push(&line)?;
                }
                let go_on = each(&line);
                self.lines.push(line);
                if !go_on {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// The JSON schema of each line of its file.
    pub fn json_schema() -> serde_json::Value {
        /// A line of a scan: the first is its header.
        #[derive(JsonSchema)]
        #[serde(untagged)]
        #[allow(dead_code)] // only its schema is used
        enum ScanLine {
            Header(Header),
            Line(Line),
        }
        schemars::schema_for!(ScanLine).to_value()
    }

    /// A picture of it: layers by modules, the darker the worse (SVG).
    pub fn heat_map(&self) -> String {
        report::heat_map(self)
    }
}

//! `carat scan`.

use std::process::ExitCode;

use carat_bundle::source::TensorSource;
use carat_fidelity::{
    Baseline, Probe,
    scan::{self, Header, Line, Mode, Part, SCAN_SCHEMA, SCAN_VERSION, units},
};
use carat_quant::{Quantizer, Recipe, Simulated, Target, allocate::Family};
use serde_json::json;

use super::{ground::Ground, write_whole};
use crate::{
    failure::{Failure, OrInput as _, Outcome},
    interrupt,
    model::threads,
    output,
    progress::Bar,
    simulate_args::{FamilyKind, Scan},
};

/// Lines of each kind that are shown on the terminal.
const SHOWN: usize = 5;

pub(crate) fn run(args: &Scan) -> Outcome {
    let family = match args.family {
        FamilyKind::Palette => Family::Palette,
        FamilyKind::Linear => Family::Linear,
    };
    let bits = widths(args, family)?;
    let threads = threads(args.model.threads)?;
    let ground = Ground::open(&args.model, args.fixture.as_deref())?;
    let (spec, source) = (&ground.source.spec, ground.source.tensors());
    // What does not fit the model is said before anything is measured.
    let mut plans = Vec::new();
    for &bits in &bits {
        let recipe = Recipe::parse(family.name(), &family.uniform(bits))?;
        let plan = recipe.resolve(spec)?;
        plans.push((bits, recipe, plan));
    }

    let text = ground.text(args.text.as_deref())?;
    let steps = ground.given_fixture().map(|f| Probe::steps(&f.cases));
    let probe = steps.unwrap_or_default().and(Probe::text(&text));
    if probe.positions() == 0 {
        return Err(Failure::input(anyhow::anyhow!(
            "{}: without a tokenizer there is no text to ask",
            args.model.model
        ))
        .hint("--fixture names a file of answers"));
    }
    let bar = Bar::new();
    bar.start("asking the reference", None, false);
    let reference = ground.reference(probe.positions())?;
    // Two more walk beside it: everything damaged, and what is measured.
    ground.require(spec)?;
    let baseline = Baseline::new(&reference, probe)?;
    let mut units = units(spec);
    units.retain(|unit| !args.matrices || unit.part == Part::Matrix);
    let header = Header {
        schema: SCAN_SCHEMA.into(),
        version: SCAN_VERSION,
        model: ground.source.name.clone(),
        source_digest: ground.origin.digest.clone(),
        method: family.name().into(),
        bits: bits.clone(),
        probe_digest: baseline.probe().digest(),
        positions: baseline.probe().positions(),
        clear: baseline.clear(),
    };
    let mut scan = scan::Scan::resume(&args.out, header)?;
    if !scan.lines.is_empty() {
        output::note(&format!("{} measured before", scan.lines.len()));
    }
    bar.finish();

    let apart = |u: &&scan::Unit| matches!(u.part, Part::Layer | Part::Module);
    let total = bits.len() * (units.len() + units.iter().filter(apart).count());
    let bar = Bar::new();
    bar.start("measuring", Some(total as u64), false);
    bar.set(scan.lines.len() as u64);
    interrupt::listen();
    interrupt::clear();
    let mut whole = true;
    for (bits, recipe, plan) in &plans {
        let quantizer = Quantizer::new(recipe, plan, Target::Portable, threads).or_input()?;
        let damaged = Simulated::new(source, spec, &quantizer).or_input()?;
        let sources = (source, &damaged as &dyn TensorSource);
        whole = scan.run(&baseline, sources, (*bits, &units), &mut |_| {
            bar.advance(1);
            !interrupt::pressed()
        })?;
        if !whole {
            break;
        }
    }
    bar.finish();
    if let Some(path) = &args.heat_map {
        write_whole(path, scan.heat_map().as_bytes())?;
    }
    report(args, &scan, (whole, total))
}

/// The widths that were asked for, in order and once each.
fn widths(args: &Scan, family: Family) -> Outcome<Vec<u8>> {
    let mut bits = args.bits.clone();
    bits.sort_unstable();
    bits.dedup();
    match bits.iter().find(|b| !family.widths().contains(b)) {
        None => Ok(bits),
        Some(wrong) => Err(Failure::input(anyhow::anyhow!(
            "--bits {wrong}: the {} family has {:?}",
            family.name(),
            family.widths()
        ))),
    }
}

fn report(args: &Scan, scan: &scan::Scan, (whole, total): (bool, usize)) -> Outcome {
    if args.model.json {
        output::json(&json!({
            "schema": "carat.scan-report",
            "version": 1,
            "out": args.out,
            "heat_map": args.heat_map,
            "scan": scan.header,
            "measured": scan.lines.len(),
            "of": total,
            "finished": whole,
        }))
        .or_input()?;
    } else {
        let header = &scan.header;
        let line = |text: String| output::line(&text).or_input();
        line(format!(
            "{}, {}: {} positions, {} of them clear",
            header.model, header.method, header.positions, header.clear
        ))?;
        for &bits in &header.bits {
            let kinds = [
                (Part::Model, Mode::Alone, "everything"),
                (Part::Layer, Mode::Alone, "layers alone"),
                (Part::Layer, Mode::AllBut, "everything but a layer"),
                (Part::Module, Mode::Alone, "modules alone"),
                (Part::Module, Mode::AllBut, "everything but a module"),
                (Part::Matrix, Mode::Alone, "matrices alone"),
            ];
            for (part, mode, title) in kinds {
                for text in table(scan, bits, (part, mode), title) {
                    line(text)?;
                }
            }
        }
    }
    if !whole {
        output::note("interrupted: the same command goes on with what is left");
    }
    Ok(ExitCode::SUCCESS)
}

/// The lines of one kind that matter most: those that harm most alone, or whose being
/// spared helps most.
fn table(scan: &scan::Scan, bits: u8, (part, mode): (Part, Mode), title: &str) -> Vec<String> {
    let of_kind = |l: &&Line| (l.part, l.mode, l.bits) == (part, mode, bits);
    let mut lines: Vec<&Line> = scan.lines.iter().filter(of_kind).collect();
    lines.sort_by(|a, b| match mode {
        Mode::Alone => b.harm.kl.total_cmp(&a.harm.kl),
        Mode::AllBut => a.harm.kl.total_cmp(&b.harm.kl),
    });
    let show = |l: &&Line| {
        format!(
            "         {:<24} KL {:.3e}, at most {:.2e}, {} clear flips",
            l.unit, l.harm.kl, l.harm.kl_max, l.harm.flips
        )
    };
    let heading = format!("{bits} bits   {title}");
    let shown = lines.iter().take(SHOWN).map(show);
    match lines.is_empty() {
        true => vec![],
        false => std::iter::once(heading).chain(shown).collect(),
    }
}

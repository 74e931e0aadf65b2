//! One model in many formats: what equal bytes and equal fidelity buy.

use super::{
    Table,
    content::{Section, arm_table, figure, point, spread_text, told, words},
    plot::{Plot, Series},
};
use crate::{ArmResult, Spread};

/// Models of up to this share more bytes than the smallest of their group count
/// as equal: what tables of scales and padding of one format differ by.
const EQUAL_BYTES: f64 = 1.03;

/// Models of different formats and granularities.
pub(super) fn section(title: String, mut text: Vec<String>, arms: &[ArmResult]) -> Section {
    let plot = |title: &str, of: fn(&ArmResult) -> Option<Spread>| Plot {
        title: title.into(),
        x: "megabytes of weights".into(),
        y: "tokens per second".into(),
        log_x: false,
        lines: false,
        series: arms
            .iter()
            .filter_map(|arm| {
                let size = arm.info.model_bytes? as f64 / 1e6;
                Some(Series {
                    name: format!("{} ({})", arm.info.name, arm.info.fidelity.label()),
                    points: vec![point(size, of(arm)?)],
                })
            })
            .collect(),
    };
    text.push(
        "Equal bytes: models within 3 % of the smallest of their group, the fastest decode \
         first. Equal fidelity: models with one verdict, the smallest first. Ratios are of \
         decode over the first of the group."
            .into(),
    );
    Section {
        title,
        text,
        plots: vec![
            plot("Decode by size", |a| a.decode_tps),
            plot("Prefill by size", |a| a.prompt_tps),
        ],
        tables: vec![
            arm_table(arms),
            grouped("equal bytes", &equal_bytes(arms)),
            grouped("equal fidelity", &equal_fidelity(arms)),
        ],
    }
}

fn decode(arm: &ArmResult) -> f64 {
    arm.decode_tps.map_or(0.0, |s| s.median)
}

/// Groups of like size, by size.
fn equal_bytes(arms: &[ArmResult]) -> Vec<(String, Vec<&ArmResult>)> {
    let mut sized: Vec<(u64, &ArmResult)> = arms
        .iter()
        .filter_map(|arm| Some((arm.info.model_bytes?, arm)))
        .collect();
    sized.sort_by_key(|(bytes, _)| *bytes);
    let mut groups: Vec<(u64, Vec<&ArmResult>)> = Vec::new();
    for (bytes, arm) in sized {
        match groups.last_mut() {
            Some((least, group)) if bytes as f64 <= *least as f64 * EQUAL_BYTES => group.push(arm),
            _ => groups.push((bytes, vec![arm])),
        }
    }
    let mut named = Vec::new();
    for (least, mut group) in groups {
        group.sort_by(|a, b| decode(b).total_cmp(&decode(a)));
        named.push((format!("{} MB", figure(least as f64 / 1e6)), group));
    }
    named
}

/// Groups of one verdict, in the order in which verdicts appear.
fn equal_fidelity(arms: &[ArmResult]) -> Vec<(String, Vec<&ArmResult>)> {
    let mut groups: Vec<(String, Vec<&ArmResult>)> = Vec::new();
    for arm in arms {
        let verdict = arm.info.fidelity.label();
        match groups.iter_mut().find(|(v, _)| v == verdict) {
            Some((_, group)) => group.push(arm),
            None => groups.push((verdict.to_owned(), vec![arm])),
        }
    }
    for (_, group) in &mut groups {
        group.sort_by_key(|arm| arm.info.model_bytes.unwrap_or(u64::MAX));
    }
    groups
}

/// One row a model, group by group.
fn grouped(what: &str, groups: &[(String, Vec<&ArmResult>)]) -> Table {
    let rows = groups.iter().flat_map(|(name, group)| {
        group.iter().map(move |arm| {
            let ratio = decode(arm) / decode(group[0]);
            vec![
                name.clone(),
                arm.info.name.clone(),
                told(arm.info.model_bytes.map(|b| b as f64 / 1e6), |mb| {
                    format!("{} MB", figure(mb))
                }),
                told(arm.info.bits_per_weight, figure),
                arm.info.fidelity.label().to_owned(),
                spread_text(arm.decode_tps),
                told(Some(ratio).filter(|r| r.is_finite()), |r| format!("{r:.2}")),
            ]
        })
    });
    Table {
        head: words(&[
            what,
            "arm",
            "size",
            "bits/weight",
            "gate",
            "decode tok/s",
            "over the first",
        ]),
        rows: rows.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ArmInfo, ArmKind, Fidelity};

    fn arm(name: &str, bytes: u64, verdict: Option<&str>, tps: f64) -> ArmResult {
        let mut info = ArmInfo::new(name, ArmKind::Carat, "carat", name);
        info.model_bytes = Some(bytes);
        info.fidelity = Fidelity {
            verdict: verdict.map(str::to_owned),
            basis: String::new(),
        };
        let mut arm = ArmResult::new(info, Vec::new());
        arm.decode_tps = crate::spread(&[tps]);
        arm
    }

    #[test]
    fn models_are_grouped_by_bytes_and_by_verdict() {
        let arms = [
            arm("int8", 200, Some("PASS"), 50.0),
            arm("int4 a", 100, Some("FAIL"), 90.0),
            arm("int4 b", 103, Some("PASS"), 99.0),
            arm("int4 c", 104, None, 80.0),
        ];
        let names = |groups: Vec<(String, Vec<&ArmResult>)>| -> Vec<String> {
            let names = |g: &[&ArmResult]| g.iter().map(|a| a.info.name.clone()).collect();
            groups
                .iter()
                .map(|(name, g)| {
                    let names: Vec<String> = names(g);
                    format!("{name}: {}", names.join(", "))
                })
                .collect()
        };
        // 104 is more than 3 % above 100.
        assert_eq!(
            names(equal_bytes(&arms)),
            [
                "0.000 MB: int4 b, int4 a",
                "0.000 MB: int4 c",
                "0.000 MB: int8"
            ]
        );
        assert_eq!(
            names(equal_fidelity(&arms)),
            ["PASS: int4 b, int8", "FAIL: int4 a", "ungated: int4 c"]
        );
        let table = grouped("equal fidelity", &equal_fidelity(&arms));
        assert_eq!(table.rows[1][6], "0.51");
    }
}

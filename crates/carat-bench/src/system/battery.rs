//! What the operating system tells about a battery.

use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::counters::{entries, number, text};

/// A battery's state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BatteryReading {
    /// Charge in percent.
    pub percent: f64,
    /// Whether it is giving power rather than taking it.
    pub discharging: bool,
}

impl BatteryReading {
    /// The first battery that the system lists.
    pub(super) fn read(root: &Path) -> Option<BatteryReading> {
        let supplies = entries(&root.join("sys/class/power_supply"), "");
        supplies.iter().find_map(|supply| {
            if text(supply.join("type"))? != "Battery" {
                return None;
            }
            Some(BatteryReading {
                percent: number(supply.join("capacity"))?,
                discharging: text(supply.join("status"))? == "Discharging",
            })
        })
    }
}

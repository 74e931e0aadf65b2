//! NVIDIA devices, through the command of their driver (`nvidia-smi`, which is
//! NVML's own): no library is linked or loaded for machines without one.

use std::process::{Command, Stdio};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What NVML tells about the first device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GpuReading {
    /// Device name.
    pub name: String,
    /// Clock of the multiprocessors, MHz.
    pub clock_mhz: Option<f64>,
    /// Degrees Celsius.
    pub temperature_c: Option<f64>,
    /// Watts.
    pub power_w: Option<f64>,
    /// Share of the time that some kernel ran, percent.
    pub utilization_percent: Option<f64>,
}

const FIELDS: &str = "name,clocks.sm,temperature.gpu,power.draw,utilization.gpu";

impl GpuReading {
    /// Asks the driver; `None` where there is no driver or no device.
    pub(super) fn read(program: &str) -> Option<GpuReading> {
        let output = Command::new(program)
            .arg(format!("--query-gpu={FIELDS}"))
            .args(["--format=csv,noheader,nounits", "-i", "0"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .ok()?;
        if !output.status.success() {
            return None;
        }
        GpuReading::parse(&String::from_utf8_lossy(&output.stdout))
    }

    /// One line of comma-separated fields; `[N/A]` and the like are `None`.
    fn parse(text: &str) -> Option<GpuReading> {
        let fields: Vec<&str> = text.lines().next()?.split(',').map(str::trim).collect();
        let [name, clock, temperature, power, utilization] = fields[..] else {
            return None;
        };
        let number = |text: &str| text.parse().ok().filter(|n: &f64| n.is_finite());
        Some(GpuReading {
            name: name.to_owned(),
            clock_mhz: number(clock),
            temperature_c: number(temperature),
            power_w: number(power),
            utilization_percent: number(utilization),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_driver_does_not_tell_is_absent_not_zero() {
        let reading = GpuReading::parse("NVIDIA H200, 1980, 41, 121.50, 0\n").unwrap();
        assert_eq!(reading.power_w, Some(121.5));
        assert_eq!(reading.utilization_percent, Some(0.0));
        let reading = GpuReading::parse("NVIDIA X, [N/A], 41, [Not Supported], 3").unwrap();
        assert_eq!((reading.clock_mhz, reading.power_w), (None, None));
        assert_eq!(GpuReading::parse("No devices were found"), None);
        assert_eq!(GpuReading::parse(""), None);
        assert_eq!(GpuReading::read("no-such-program-as-this"), None);
    }
}

//! Readings of everything that a system tells about itself.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    battery::BatteryReading,
    counters::{busy, entries, number, spent_by, text},
    gpu::GpuReading,
};
use crate::Nanos;

/// Which processes do the work of an arm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Processes {
    /// This one and children that it waits for.
    Own,
    /// This one and another, by its id.
    With(u32),
    /// Somebody else's: who disturbs whom cannot be told.
    Unknown,
}

/// The machine at one moment. What the system does not tell is `None`
/// (`null`, printed as `not available`), never 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Reading {
    /// Clock of one processor as measured with dependent additions, Hz.
    pub clock_hz: Option<f64>,
    /// Mean clock of the processors as the system tells it, MHz.
    pub cpu_mhz: Option<f64>,
    /// The hottest sensor, degrees Celsius.
    pub temperature_c: Option<f64>,
    /// How often processors were throttled for their heat since the start.
    pub throttle_events: Option<u64>,
    /// Energy of all packages since the start of the run (RAPL), microjoules.
    pub cpu_energy_uj: Option<u64>,
    /// Time that all processors spent on anything since the start.
    pub busy_ns: Option<Nanos>,
    /// The part of it that the measured processes spent.
    pub own_ns: Option<Nanos>,
    /// The first NVIDIA device.
    pub gpu: Option<GpuReading>,
    /// The battery.
    pub battery: Option<BatteryReading>,
}

/// Where readings come from: tests put their own in its place.
pub trait Sensors {
    /// Reads everything there is.
    fn read(&mut self, processes: &Processes) -> Reading;
}

/// The sensors of this machine.
pub struct SystemSensors {
    root: PathBuf,
    /// Measures the clock.
    clock: fn() -> Option<f64>,
    gpu: Option<String>,
    /// Last value and sum of each energy counter, which wrap.
    energy: HashMap<PathBuf, (u64, u64)>,
}

impl SystemSensors {
    /// Looks for sensors.
    pub fn new() -> SystemSensors {
        let program = "nvidia-smi".to_owned();
        SystemSensors {
            gpu: GpuReading::read(&program).map(|_| program),
            ..SystemSensors::at(Path::new("/"), carat_kernels::clock_hz)
        }
    }

    /// The files below another root.
    fn at(root: &Path, clock: fn() -> Option<f64>) -> SystemSensors {
        SystemSensors {
            root: root.to_owned(),
            clock,
            gpu: None,
            energy: HashMap::new(),
        }
    }

    fn cpus(&self) -> Vec<PathBuf> {
        let mut cpus = entries(&self.root.join("sys/devices/system/cpu"), "cpu");
        cpus.retain(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name[3..].bytes().all(|b| b.is_ascii_digit()) && name.len() > 3
        });
        cpus
    }

    fn cpu_mhz(&self) -> Option<f64> {
        let clocks: Vec<f64> = self
            .cpus()
            .iter()
            .filter_map(|cpu| number(cpu.join("cpufreq/scaling_cur_freq")))
            .collect();
        (!clocks.is_empty()).then(|| clocks.iter().sum::<f64>() / clocks.len() as f64 / 1e3)
    }

    fn throttle_events(&self) -> Option<u64> {
        let counts = self.cpus().into_iter().filter_map(|cpu| {
            number(cpu.join("thermal_throttle/core_throttle_count")).map(|n| n as u64)
        });
        counts.reduce(u64::saturating_add)
    }

    fn temperature_c(&self) -> Option<f64> {
        let class = self.root.join("sys/class");
        let zones = entries(&class.join("thermal"), "thermal_zone")
            .into_iter()
            .map(|zone| zone.join("temp"));
        let monitors = entries(&class.join("hwmon"), "hwmon")
            .into_iter()
            .flat_map(|monitor| entries(&monitor, "temp"))
            .filter(|path| path.to_string_lossy().ends_with("_input"));
        zones
            .chain(monitors)
            .filter_map(|path| Some(number(path)? / 1e3))
            .reduce(f64::max)
    }

    /// Energy since the first reading. Packages only (`intel-rapl:0`): what is
    /// below them is part of them.
    fn cpu_energy_uj(&mut self) -> Option<u64> {
        let packages = entries(&self.root.join("sys/class/powercap"), "intel-rapl:");
        let mut found = None;
        for package in packages {
            let name = package.file_name().unwrap_or_default().to_string_lossy();
            let is_package = name.matches(':').count() == 1
                && text(package.join("name")).is_some_and(|n| n.starts_with("package"));
            let Some(now) = number(package.join("energy_uj")).filter(|_| is_package) else {
                continue;
            };
            let now = now as u64;
            let range = number(package.join("max_energy_range_uj")).map_or(0, |n| n as u64);
            let (last, sum) = self.energy.entry(package).or_insert((now, 0));
            // A counter that is lower than before has wrapped once.
            let step = now
                .checked_sub(*last)
                .unwrap_or_else(|| (range - (*last).min(range)).saturating_add(now));
            *sum = sum.saturating_add(step);
            *last = now;
            found = Some(found.unwrap_or(0u64).saturating_add(*sum));
        }
        found
    }
}

impl Default for SystemSensors {
    fn default() -> Self {
        SystemSensors::new()
    }
}

impl Sensors for SystemSensors {
    fn read(&mut self, processes: &Processes) -> Reading {
        // First, so that measuring the clock counts as time of this process.
        let clock_hz = (self.clock)();
        let own = spent_by(&self.root, "self");
        let own_ns = match processes {
            Processes::Own => own,
            Processes::With(pid) => own
                .zip(spent_by(&self.root, &pid.to_string()))
                .map(|(own, other)| Nanos(own.0.saturating_add(other.0))),
            Processes::Unknown => None,
        };
        Reading {
            clock_hz,
            cpu_mhz: self.cpu_mhz(),
            temperature_c: self.temperature_c(),
            throttle_events: self.throttle_events(),
            cpu_energy_uj: self.cpu_energy_uj(),
            busy_ns: busy(&self.root),
            own_ns,
            gpu: self.gpu.as_deref().and_then(GpuReading::read),
            battery: BatteryReading::read(&self.root),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sensors(files: &[(&str, &str)]) -> (tempfile::TempDir, SystemSensors) {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), files);
        let sensors = SystemSensors::at(dir.path(), || None);
        (dir, sensors)
    }

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn a_machine_without_sensors_says_nothing() {
        let (_dir, mut sensors) = sensors(&[]);
        assert_eq!(sensors.read(&Processes::Own), Reading::default());
    }

    #[test]
    fn sensors_are_read_in_their_units() {
        let cpu = "sys/devices/system/cpu";
        let (_dir, mut sensors) = sensors(&[
            (&format!("{cpu}/cpu0/cpufreq/scaling_cur_freq"), "3000000\n"),
            (&format!("{cpu}/cpu1/cpufreq/scaling_cur_freq"), "2000000\n"),
            (&format!("{cpu}/cpufreq/nothing"), "1\n"),
            (
                &format!("{cpu}/cpu0/thermal_throttle/core_throttle_count"),
                "3",
            ),
            (
                &format!("{cpu}/cpu1/thermal_throttle/core_throttle_count"),
                "4",
            ),
            ("sys/class/thermal/thermal_zone0/temp", "41000"),
            ("sys/class/hwmon/hwmon1/temp1_input", "67500"),
            ("sys/class/hwmon/hwmon1/temp1_max", "99000"),
            ("sys/class/power_supply/AC/type", "Mains"),
            ("sys/class/power_supply/BAT0/type", "Battery\n"),
            ("sys/class/power_supply/BAT0/capacity", "81"),
            ("sys/class/power_supply/BAT0/status", "Discharging"),
        ]);
        let reading = sensors.read(&Processes::Own);
        assert_eq!(reading.cpu_mhz, Some(2500.0));
        assert_eq!(reading.throttle_events, Some(7));
        assert_eq!(reading.temperature_c, Some(67.5));
        let battery = reading.battery.unwrap();
        assert!(battery.discharging && battery.percent == 81.0);
    }

    #[test]
    fn energy_counts_packages_and_survives_a_wrap() {
        let rapl = |energy: &str| {
            let package = "sys/class/powercap/intel-rapl:0";
            [
                (format!("{package}/name"), "package-0\n".to_owned()),
                (format!("{package}/energy_uj"), energy.to_owned()),
                (format!("{package}/max_energy_range_uj"), "1000".to_owned()),
                // Part of the package, and not a package.
                (
                    "sys/class/powercap/intel-rapl:0:0/energy_uj".into(),
                    "5".into(),
                ),
                ("sys/class/powercap/intel-rapl:1/name".into(), "psys".into()),
                (
                    "sys/class/powercap/intel-rapl:1/energy_uj".into(),
                    energy.into(),
                ),
            ]
        };
        let (dir, mut sensors) = sensors(&[]);
        let mut at = |energy: &str| {
            let files = rapl(energy);
            let files: Vec<_> = files
                .iter()
                .map(|(p, t)| (p.as_str(), t.as_str()))
                .collect();
            write(dir.path(), &files);
            sensors.read(&Processes::Own).cpu_energy_uj
        };
        assert_eq!(at("900"), Some(0));
        assert_eq!(at("950"), Some(50));
        assert_eq!(at("30"), Some(50 + 50 + 30));
    }
}

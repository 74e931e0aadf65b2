//! `strftime_now` without a time zone database: times are UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Seconds since 1970.
pub(super) fn now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(0))
}

/// A point in time, taken apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    seconds: i64,
    year: i64,
    /// 1 to 12.
    month: usize,
    /// 1 to 31.
    day: i64,
}

impl Moment {
    /// The moment `seconds` after 1970-01-01 00:00 UTC; years 1 to 9999.
    pub(super) fn at(seconds: i64) -> Self {
        let seconds = seconds.clamp(-62_135_596_800, 253_402_300_799);
        // Days to civil date by eras of 400 years, with years starting in March
        // so that the leap day is the last of the year.
        let shifted = seconds.div_euclid(86_400) + 719_468;
        let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * day_of_year + 2) / 153;
        let month = if from_march < 10 {
            from_march + 3
        } else {
            from_march - 9
        };
        Self {
            seconds,
            year: era * 400 + year_of_era + i64::from(month <= 2),
            month: usize::try_from(month).unwrap_or(1),
            day: day_of_year - (153 * from_march + 2) / 5 + 1,
        }
    }

    fn day_of_year(&self) -> i64 {
        let leap = self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0);
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][self.month - 1];
        before + self.day + i64::from(leap && self.month > 2)
    }

    /// Formats as C's `strftime` does in the "C" locale.
    ///
    /// # Errors
    ///
    /// Names a directive that is not supported.
    pub(super) fn format(&self, pattern: &str) -> Result<String, String> {
        let of_day = self.seconds.rem_euclid(86_400);
        let (hour, minute, second) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
        let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
        let weekday = (self.seconds.div_euclid(86_400) + 4).rem_euclid(7);
        let weekday_name = DAYS[usize::try_from(weekday).unwrap_or(0)];
        let month_name = MONTHS[self.month - 1];
        let mut out = String::new();
        let mut chars = pattern.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next();
            let unpadded = directive == Some('-');
            if unpadded {
                directive = chars.next();
            }
            let number = |value: i64, width: usize| {
                if unpadded {
                    value.to_string()
                } else {
                    format!("{value:0width$}")
                }
            };
            let text = match directive {
                Some('d') => number(self.day, 2),
                Some('e') if unpadded => self.day.to_string(),
                Some('e') => format!("{:2}", self.day),
                Some('m') => number(self.month as i64, 2),
                Some('Y') => self.year.to_string(),
                Some('y') => number(self.year % 100, 2),
                Some('b' | 'h') => month_name[..3].to_owned(),
                Some('B') => month_name.to_owned(),
                Some('a') => weekday_name[..3].to_owned(),
                Some('A') => weekday_name.to_owned(),
                Some('w') => weekday.to_string(),
                Some('u') => if weekday == 0 { 7 } else { weekday }.to_string(),
                Some('j') => number(self.day_of_year(), 3),
                Some('H') => number(hour, 2),
                Some('I') => number(hour12, 2),
                Some('M') => number(minute, 2),
                Some('S') => number(second, 2),
                Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
                Some('s') => self.seconds.to_string(),
                Some('Z') => "UTC".to_owned(),
                Some('z') => "+0000".to_owned(),
                Some('F') => self.format("%Y-%m-%d")?,
                Some('T' | 'X') => self.format("%H:%M:%S")?,
                Some('R') => self.format("%H:%M")?,
                Some('D' | 'x') => self.format("%m/%d/%y")?,
                Some('c') => self.format("%a %b %e %H:%M:%S %Y")?,
                Some('n') => "\n".to_owned(),
                Some('t') => "\t".to_owned(),
                Some('%') => "%".to_owned(),
                Some(other) => return Err(format!("strftime directive %{other} is not supported")),
                None => return Err("strftime format ends with a lone %".to_owned()),
            };
            out.push_str(&text);
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments() {
        // 2024-02-29 23:05:09 UTC, a Thursday.
        let m = Moment::at(1_709_247_909);
        assert_eq!(m.format("%d %b %Y").unwrap(), "29 Feb 2024");
        assert_eq!(
            m.format("%A, %B %-d, %Y %H:%M:%S %I %p %j %y %F %T")
                .unwrap(),
            "Thursday, February 29, 2024 23:05:09 11 PM 060 24 2024-02-29 23:05:09"
        );
        assert_eq!(
            Moment::at(0).format("%c").unwrap(),
            "Thu Jan  1 00:00:00 1970"
        );
        assert_eq!(
            Moment::at(-1).format("%F %T").unwrap(),
            "1969-12-31 23:59:59"
        );
        assert_eq!(
            Moment::at(951_782_400).format("%F %j").unwrap(),
            "2000-02-29 060"
        );
        assert_eq!(Moment::at(i64::MAX).format("%Y").unwrap(), "9999");
        assert_eq!(Moment::at(i64::MIN).format("%Y").unwrap(), "1");
    }

    #[test]
    fn unknown_directives_are_named() {
        assert!(Moment::at(0).format("%Q").unwrap_err().contains("%Q"));
        assert!(Moment::at(0).format("100%").is_err());
    }
}

//! Axes: from values to positions, with ticks at round numbers.

use crate::telemetry::human;

/// How an axis writes its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// `512`, `1.5k`.
    #[default]
    Count,
    /// `2.50`.
    Decimal,
    /// `3e-4`.
    Scientific,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    low: f64,
    high: f64,
    logarithmic: bool,
    /// Values of the ticks, rising.
    pub ticks: Vec<f64>,
}

impl Axis {
    /// Exactly from `low` to `high`, with about `count` round numbers between them.
    pub fn exact(low: f64, high: f64, count: usize) -> Axis {
        let (low, high) = widened(low, high);
        Axis::linear(low, high, round_step((high - low) / count as f64))
    }

    /// From a round number at or below `low` to one at or above `high`.
    pub fn round(low: f64, high: f64, count: usize) -> Axis {
        let (low, high) = widened(low, high);
        let step = round_step((high - low) / count as f64);
        // The tolerance keeps a value that is round except for rounding errors from adding a step.
        let below = (low / step + 1e-9).floor() * step;
        let above = (high / step - 1e-9).ceil() * step;
        Axis::linear(below, above, step)
    }

    fn linear(low: f64, high: f64, step: f64) -> Axis {
        let first = (low / step - 1e-9).ceil() as i64;
        let last = (high / step + 1e-9).floor() as i64;
        Axis {
            low,
            high,
            logarithmic: false,
            ticks: (first..=last).map(|nth| nth as f64 * step).collect(),
        }
    }

    /// Logarithmic, between numbers of the series 1, 2, 5, 10; both ends are above 0. Over more
    /// than two decades only powers of ten are written.
    pub fn logarithmic(low: f64, high: f64) -> Axis {
        let from = low.log10().floor() as i32;
        let to = high.log10().ceil() as i32 + 1;
        let series: Vec<f64> = (from..=to)
            .flat_map(|decade| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(decade)))
            .collect();
        let below = series.iter().rposition(|&tick| tick <= low * (1.0 + 1e-9));
        let below = below.unwrap_or(0);
        let above = series.iter().position(|&tick| tick >= high * (1.0 - 1e-9));
        let above = above.unwrap_or(series.len() - 1).max(below + 1);
        let every = if series[above] > series[below] * 100.0 {
            3
        } else {
            1
        };
        Axis {
            low: series[below],
            high: series[above],
            logarithmic: true,
            ticks: (below..=above)
                .filter(|nth| nth % every == 0)
                .map(|nth| series[nth])
                .collect(),
        }
    }

    /// Logarithmic, with space around the values. The values themselves are the ticks as far as there is
    /// space; all are above 0.
    pub fn named(values: impl Iterator<Item = f64>) -> Axis {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let ends = (values.first().copied(), values.last().copied());
        let (low, high) = (ends.0.unwrap_or(1.0) / 1.5, ends.1.unwrap_or(1.0) * 1.5);
        let mut axis = Axis {
            low,
            high,
            logarithmic: true,
            ticks: Vec::new(),
        };
        // From the last value down: the batch that lasts longest is the last and largest.
        for value in values.into_iter().rev() {
            let near = |&tick: &f64| axis.place(tick) - axis.place(value) < 0.08;
            if !axis.ticks.last().is_some_and(near) {
                axis.ticks.push(value);
            }
        }
        axis.ticks.reverse();
        axis
    }

    /// Position of a value, 0 at the low end and 1 at the high end; values beyond are clamped.
    pub fn place(&self, value: f64) -> f64 {
        let share = if self.logarithmic {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        // The logarithm of 0 is drawn at the low end too.
        if share > 0.0 { share.min(1.0) } else { 0.0 }
    }

    /// The low and the high end.
    pub fn ends(&self) -> (f64, f64) {
        (self.low, self.high)
    }

    /// A tick with as many digits as distinguish the ticks.
    pub fn label(&self, tick: f64, format: Format) -> String {
        match format {
            Format::Count => human::short(tick),
            Format::Scientific if tick == 0.0 => "0".to_owned(),
            Format::Scientific => format!("{tick:.1e}").replace(".0e", "e"),
            Format::Decimal if self.logarithmic => {
                let decimals = (-tick.log10().floor()).max(0.0) as usize;
                format!("{tick:.decimals$}")
            }
            Format::Decimal => {
                let step = self.ticks.get(1).map_or(1.0, |next| next - self.ticks[0]);
                // A step of 0.25 has a digit more than its size says.
                let decimals = (1.0 - step.log10().floor()).max(0.0) as usize;
                let shown: Vec<String> = self
                    .ticks
                    .iter()
                    .map(|tick| format!("{tick:.decimals$}"))
                    .collect();
                let spare = decimals > 0 && shown.iter().all(|text| text.ends_with('0'));
                let decimals = decimals - usize::from(spare);
                format!("{tick:.decimals$}")
            }
        }
    }
}

/// Widens equal ends, so that they differ.
fn widened(low: f64, high: f64) -> (f64, f64) {
    if high > low {
        return (low, high);
    }
    let margin = if low == 0.0 { 1.0 } else { 0.1 * low.abs() };
    (low - margin, low + margin)
}

/// The smallest of 1, 2, 2.5, 5, 10 × 10ⁿ that is at least `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let digits = [1.0, 2.0, 2.5, 5.0, 10.0];
    let digit = digits
        .into_iter()
        .find(|digit| digit * power >= step * (1.0 - 1e-9));
    digit.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis, format: Format) -> Vec<String> {
        axis.ticks
            .iter()
            .map(|&tick| axis.label(tick, format))
            .collect()
    }

    #[test]
    fn ticks_are_round_and_distinct() {
        let loss = Axis::round(2.013, 5.61, 4);
        assert_eq!(labels(&loss, Format::Decimal), ["2", "3", "4", "5", "6"]);
        let close = Axis::round(0.03, 0.9, 4);
        assert_eq!(
            labels(&close, Format::Decimal),
            ["0.00", "0.25", "0.50", "0.75", "1.00"]
        );
        let samples = Axis::exact(0.0, 207_865.0, 5);
        assert_eq!(
            labels(&samples, Format::Count),
            ["0", "50k", "100k", "150k", "200k"]
        );
        let rate = Axis::round(0.0, 3.1e-4, 4);
        assert_eq!(
            labels(&rate, Format::Scientific),
            ["0", "1e-4", "2e-4", "3e-4", "4e-4"]
        );
    }

    #[test]
    fn logarithms_count_in_ones_twos_and_fives() {
        let ratio = Axis::logarithmic(0.3, 4.0);
        assert_eq!(
            labels(&ratio, Format::Decimal),
            ["0.2", "0.5", "1", "2", "5"]
        );
        assert_eq!(ratio.place(1.0), 0.5);
        assert_eq!(ratio.place(0.0), 0.0);
        let wide = Axis::logarithmic(0.013, 1000.0);
        assert_eq!(
            labels(&wide, Format::Decimal),
            ["0.01", "0.1", "1", "10", "100", "1000"]
        );
        let one = Axis::logarithmic(128.0, 128.0);
        assert_eq!(labels(&one, Format::Count), ["100", "200"]);
    }

    #[test]
    fn named_values_do_not_overlap() {
        let batches = [32.0, 64.0, 64.0, 128.0, 8000.0, 8192.0];
        let axis = Axis::named(batches.into_iter());
        assert_eq!(labels(&axis, Format::Count), ["32", "64", "128", "8.19k"]);
        assert!(axis.place(32.0) > 0.0 && axis.place(8192.0) < 1.0);
    }

    #[test]
    fn a_single_value_has_an_axis_around_it() {
        for value in [0.0, 3.7, -2.0, 1e-9, 1e12] {
            let axis = Axis::round(value, value, 4);
            assert!(
                (0.2..=0.8).contains(&axis.place(value)),
                "{value}: {axis:?}"
            );
            assert!(axis.ticks.len() >= 2, "{value}: {axis:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn ticks_stay_on_the_axis(low in -1e6f64..1e6, span in 1e-6f64..1e6, count in 2usize..8) {
            for axis in [Axis::exact(low, low + span, count), Axis::round(low, low + span, count)] {
                proptest::prop_assert!(axis.ticks.len() <= 2 * count + 2);
                for pair in axis.ticks.windows(2) {
                    proptest::prop_assert!(axis.place(pair[0]) < axis.place(pair[1]));
                }
            }
            // A rounded axis has a number at each end.
            let round = Axis::round(low, low + span, count);
            let ends = round.ticks.iter().map(|&tick| round.place(tick));
            let ends: Vec<f64> = ends.collect();
            proptest::prop_assert!(ends[0] < 1e-6 && ends[ends.len() - 1] > 1.0 - 1e-6);
        }
    }
}

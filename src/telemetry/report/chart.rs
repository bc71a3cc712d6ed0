//! One plot over the samples, as `page.html` draws it.
//!
//! The SVG is a square of 100 units that the page stretches to any size, so a position is a percentage in the
//! drawing and beside it. Strokes keep their width, and all text is HTML beside the SVG. A dot is a line of zero
//! length with round ends, which stays round.

use serde_json::{Value, json};

use super::axis::{Axis, Format};
use super::series::{Point, Series, Shape};

/// Approximate number of ticks on an axis.
const TICKS: usize = 4;

/// The source of the value axis's ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Range {
    /// The extent of the values.
    Values,
    /// From 0 to the largest value.
    #[default]
    FromZero,
    /// Logarithmic, from the values; values of 0 or less are drawn at the low end.
    Logarithmic,
    /// Logarithmic, with the values themselves as ticks.
    Named,
}

/// A horizontal line with a name.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    pub name: String,
    pub class: &'static str,
    pub y: f64,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Chart {
    /// The figure's id in the page.
    pub id: &'static str,
    pub title: &'static str,
    /// The quantity and its unit, one sentence.
    pub note: String,
    pub range: Range,
    pub format: Format,
    pub series: Vec<Series>,
    pub rules: Vec<Rule>,
    /// Samples at which the value was not finite.
    pub holes: Vec<f64>,
    /// Labels along the top, each from the first sample to the second.
    pub names: Vec<(f64, f64, String)>,
}

/// The axis of samples that all plots share, and the starts of the generations on it.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    pub axis: Axis,
    pub generations: Vec<f64>,
}

impl Span {
    /// From 0 to `samples`.
    pub fn new(samples: u64, generations: Vec<f64>) -> Span {
        Span {
            axis: Axis::exact(0.0, samples.max(1) as f64, TICKS + 1),
            generations,
        }
    }

    /// Position of a number of samples, in percent from the left.
    pub fn x(&self, samples: f64) -> f64 {
        percent(self.axis.place(samples))
    }

    /// The ticks, as the page shows them.
    pub fn ticks(&self) -> Vec<Value> {
        let ticks = self.axis.ticks.iter();
        ticks
            .map(|&tick| json!({ "at": self.x(tick), "label": self.axis.label(tick, Format::Count) }))
            .collect()
    }
}

impl Chart {
    /// The plot, as the page shows it.
    pub fn view(&self, span: &Span) -> Value {
        let axis = self.axis();
        let y = |value: f64| percent(1.0 - axis.place(value));
        let ticks = axis.ticks.iter();
        let rules = self.rules.iter();
        let curves = self.series.iter();
        let names = self.names.iter().map(|(from, to, name)| {
            let at = span.x(*from);
            json!({ "at": at, "width": span.x(*to) - at, "label": name })
        });
        json!({
            "id": self.id,
            "title": self.title,
            "note": self.note,
            "summary": self.summary(),
            "ys": ticks
                .map(|&tick| json!({ "at": y(tick), "label": axis.label(tick, self.format) }))
                .collect::<Vec<_>>(),
            "rules": rules
                .map(|rule| json!({ "name": rule.name, "class": rule.class, "at": y(rule.y) }))
                .collect::<Vec<_>>(),
            "curves": curves
                .map(|series| curve(series, |point| span.x(point.x), y))
                .collect::<Vec<_>>(),
            "holes": self.holes.iter().map(|&hole| span.x(hole)).collect::<Vec<_>>(),
            "names": names.collect::<Vec<_>>(),
        })
    }

    /// Data for the page's script, which shows values under the pointer: name, shape and points of every
    /// curve.
    pub fn data(&self) -> Value {
        let series = self.series.iter().map(|series| {
            let points = series.points.iter().map(|p| json!([p.x, rounded(p.y)]));
            json!({
                "holds": series.shape == Shape::Steps,
                "points": points.collect::<Vec<_>>(),
            })
        });
        series.collect()
    }

    /// Whether a curve merges several steps into a point.
    pub fn is_thinned(&self) -> bool {
        self.series.iter().any(Series::is_thinned)
    }

    fn axis(&self) -> Axis {
        let logarithmic = matches!(self.range, Range::Logarithmic | Range::Named);
        let values = || {
            let drawn = self.series.iter().flat_map(|series| &series.points);
            drawn
                .flat_map(|point| [point.low, point.high])
                .chain(self.rules.iter().map(|rule| rule.y))
                .filter(|&value| value > 0.0 || !logarithmic)
        };
        let (low, high) = extent(values());
        match self.range {
            _ if low > high => Axis::round(0.0, 1.0, TICKS),
            Range::Values => Axis::round(low, high, TICKS),
            Range::FromZero => Axis::round(low.min(0.0), high, TICKS),
            // A margin keeps the line off the edge.
            Range::Logarithmic => Axis::logarithmic(low / 1.1, high * 1.1),
            Range::Named => Axis::named(values()),
        }
    }

    /// A description of the plot for readers who cannot see it.
    fn summary(&self) -> String {
        let mut text = format!("{} over samples.", self.title);
        for series in &self.series {
            let (Some(first), Some(last)) = (series.points.first(), series.points.last()) else {
                continue;
            };
            let (low, high) = extent(series.points.iter().flat_map(|p| [p.low, p.high]));
            text += &format!(
                " {}: from {} at {} to {} at {} samples, lowest {}, highest {}.",
                series.name,
                rounded(first.y),
                first.x.round(),
                rounded(last.y),
                last.x.round(),
                rounded(low),
                rounded(high)
            );
        }
        for rule in &self.rules {
            text += &format!(" {} at {}.", rule.name, rounded(rule.y));
        }
        text
    }
}

/// A curve, as the page draws it: paths of its line, of the band behind a thinned one, and of its dots.
fn curve(series: &Series, x: impl Fn(&Point) -> f64, y: impl Fn(f64) -> f64) -> Value {
    let points = series.points.iter();
    let mut band = String::new();
    if series.is_thinned() {
        let upper = points.clone().map(|point| (x(point), y(point.high)));
        let lower = points.clone().rev().map(|point| (x(point), y(point.low)));
        let outline = upper.chain(lower).map(|(x, y)| format!("{x} {y}"));
        band = format!("M{}Z", outline.collect::<Vec<_>>().join("L"));
    }
    let mut line = String::new();
    let mut dots = String::new();
    // A line through one point would be invisible.
    let dotted = series.shape == Shape::Dots || series.points.len() == 1;
    for (nth, point) in points.enumerate() {
        let (x, y) = (x(point), y(point.y));
        line += &match (nth, series.shape) {
            (0, _) => format!("M{x} {y}"),
            (_, Shape::Steps) => format!("H{x}V{y}"),
            _ => format!("L{x} {y}"),
        };
        if dotted {
            dots += &format!("M{x} {y}h0");
        }
    }
    json!({
        "name": series.name,
        "class": series.class,
        "band": band,
        "line": line,
        "dots": dots,
    })
}

/// A share in percent, to a hundredth.
fn percent(share: f64) -> f64 {
    (share * 10_000.0).round() / 100.0
}

/// The smallest and the largest value; reversed infinities when there are none.
fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    })
}

/// Five significant digits, more than a plot shows.
fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

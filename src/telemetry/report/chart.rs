//! One plot over the samples, as an HTML figure.
//!
//! The SVG is a square of [`SIDE`] units that the page stretches to any size. Strokes keep their width, and
//! all text is HTML beside the SVG. A dot is a line of zero length with round ends, which stays round.

use serde_json::{Value, json};

use super::axis::{Axis, Format};
use super::html::escape;
use super::series::{Point, Series, Shape};
use crate::telemetry::human::plural;

/// Side of the drawing, in units.
const SIDE: f64 = 1000.0;
/// Height of the mark of a value that is not finite.
const HOLE: f64 = 40.0;
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

    fn x(&self, value: f64) -> f64 {
        SIDE * self.axis.place(value)
    }
}

impl Chart {
    pub fn html(&self, span: &Span) -> String {
        let y = self.axis();
        let ys = y.ticks.iter().map(|&tick| {
            let top = 100.0 * (1.0 - y.place(tick));
            let label = y.label(tick, self.format);
            format!("<span style=\"top:{top:.2}%\">{label}</span>")
        });
        let xs = span.axis.ticks.iter().map(|&tick| {
            let left = 100.0 * span.axis.place(tick);
            let label = span.axis.label(tick, Format::Count);
            format!("<span style=\"left:{left:.2}%\">{label}</span>")
        });
        let names = self.names.iter().map(|(from, to, name)| {
            let left = 100.0 * span.axis.place(*from);
            let width = 100.0 * span.axis.place(*to) - left;
            let name = escape(name);
            format!("<span style=\"left:{left:.2}%;width:{width:.2}%\">{name}</span>")
        });
        format!(
            "<figure id=\"{id}\"><figcaption><h2>{title}</h2><p class=\"keys\">{keys}</p>\
             </figcaption>\n<div class=\"plot\"><div class=\"ys\">{ys}</div><div class=\"area\">\
             <svg viewBox=\"0 0 {SIDE} {SIDE}\" preserveAspectRatio=\"none\" role=\"img\" \
             aria-label=\"{summary}\">{drawing}</svg><div class=\"names\">{names}</div>\
             <i class=\"cursor\"></i></div><div class=\"xs\">{xs}</div></div>\n\
             <p class=\"note\">{note}</p></figure>\n",
            id = self.id,
            title = escape(self.title),
            keys = self.keys(),
            ys = ys.collect::<String>(),
            summary = escape(&self.summary()),
            drawing = self.drawing(span, &y),
            names = names.collect::<String>(),
            xs = xs.collect::<String>(),
            note = escape(&self.full_note()),
        )
    }

    /// The inside of the SVG, from back to front.
    fn drawing(&self, span: &Span, y: &Axis) -> String {
        let place = |value: f64| SIDE * (1.0 - y.place(value));
        let mut svg = String::new();
        for &tick in &y.ticks {
            svg += &format!("<path class=\"grid\" d=\"M0 {:.1}H{SIDE}\"/>", place(tick));
        }
        for &start in span.generations.iter().filter(|&&start| start > 0.0) {
            let x = span.x(start);
            svg += &format!("<path class=\"generation\" d=\"M{x:.1} 0V{SIDE}\"/>");
        }
        for rule in &self.rules {
            let (class, y) = (rule.class, place(rule.y));
            svg += &format!("<path class=\"rule {class}\" d=\"M0 {y:.1}H{SIDE}\"/>");
        }
        for series in self
            .series
            .iter()
            .filter(|series| !series.points.is_empty())
        {
            svg += &curve(series, |point| span.x(point.x), place);
        }
        for &hole in &self.holes {
            let (x, top) = (span.x(hole), SIDE - HOLE);
            svg += &format!("<path class=\"hole\" d=\"M{x:.1} {top}V{SIDE}\"/>");
        }
        svg
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

    fn keys(&self) -> String {
        let series = self.series.iter().map(|series| {
            format!(
                "<span class=\"key {}\">{} <output></output></span>",
                series.class,
                escape(series.name)
            )
        });
        let rules = self.rules.iter().map(|rule| {
            format!(
                "<span class=\"key dashed {}\">{}</span>",
                rule.class,
                escape(&rule.name)
            )
        });
        series.chain(rules).collect::<Vec<_>>().join(" ")
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

    fn full_note(&self) -> String {
        let mut note = self.note.clone();
        if !self.holes.is_empty() {
            let steps = plural(self.holes.len() as u64, "step");
            note += &format!(" {steps} gave no finite number (marked at the bottom).");
        }
        note
    }
}

fn curve(series: &Series, x: impl Fn(&Point) -> f64, y: impl Fn(f64) -> f64) -> String {
    let class = series.class;
    let mut svg = String::new();
    if series.is_thinned() {
        let along = |point: &Point, value: f64| format!("{:.1} {:.1}", x(point), y(value));
        let upper = series.points.iter().map(|point| along(point, point.high));
        let lower = series
            .points
            .iter()
            .rev()
            .map(|point| along(point, point.low));
        let outline: Vec<String> = upper.chain(lower).collect();
        svg += &format!(
            "<path class=\"band {class}\" d=\"M{}Z\"/>",
            outline.join("L")
        );
    }
    let mut line = String::new();
    for (nth, point) in series.points.iter().enumerate() {
        let (x, y) = (x(point), y(point.y));
        line += &match (nth, series.shape) {
            (0, _) => format!("M{x:.1} {y:.1}"),
            (_, Shape::Steps) => format!("H{x:.1}V{y:.1}"),
            _ => format!("L{x:.1} {y:.1}"),
        };
    }
    svg += &format!("<path class=\"line {class}\" d=\"{line}\"/>");
    // A line through one point would be invisible.
    if series.shape == Shape::Dots || series.points.len() == 1 {
        let dots = series.points.iter();
        let dots: String = dots
            .map(|point| format!("M{:.1} {:.1}h0", x(point), y(point.y)))
            .collect();
        svg += &format!("<path class=\"dots {class}\" d=\"{dots}\"/>");
    }
    svg
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

//! Curves, thinned for drawing.

/// Most points of a curve; a screen shows no more.
pub const COLUMNS: usize = 600;

/// One drawn point: the mean of the values in its column, and their range.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    pub low: f64,
    pub high: f64,
}

/// The style of a curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// A connected line, with the range behind it where values were merged.
    Line,
    /// Each value holds until the next point.
    Steps,
    /// Points only, connected by a thin line.
    Dots,
}

/// A curve with a name.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    pub name: &'static str,
    /// Class of its colour in the page's style sheet.
    pub class: &'static str,
    pub shape: Shape,
    pub points: Vec<Point>,
}

impl Series {
    /// A line through finite values with rising x, thinned to [`COLUMNS`].
    pub fn line(name: &'static str, class: &'static str, values: &[(f64, f64)]) -> Series {
        Series {
            name,
            class,
            shape: Shape::Line,
            points: thin(values),
        }
    }

    /// Finite values with rising x, as dots.
    pub fn dots(name: &'static str, class: &'static str, values: &[(f64, f64)]) -> Series {
        Series {
            shape: Shape::Dots,
            ..Series::line(name, class, values)
        }
    }

    /// Values that hold from their x until `end`. Only changes are kept; if they are too many, the series
    /// becomes a line.
    pub fn steps(
        name: &'static str,
        class: &'static str,
        values: &[(f64, f64)],
        end: f64,
    ) -> Series {
        let mut changes = values.to_vec();
        changes.dedup_by(|next, kept| next.1 == kept.1);
        if changes.len() > COLUMNS {
            return Series::line(name, class, values);
        }
        if let Some(&(_, last)) = changes.last() {
            changes.push((end, last));
        }
        Series {
            name,
            class,
            shape: Shape::Steps,
            points: changes.into_iter().map(single).collect(),
        }
    }

    /// Whether a point merges several values.
    pub fn is_thinned(&self) -> bool {
        self.points.iter().any(|point| point.low < point.high)
    }
}

fn single((x, y): (f64, f64)) -> Point {
    Point {
        x,
        y,
        low: y,
        high: y,
    }
}

/// Merges values in the same of [`COLUMNS`] equal ranges of x.
fn thin(values: &[(f64, f64)]) -> Vec<Point> {
    let (Some(&(first, _)), Some(&(last, _))) = (values.first(), values.last()) else {
        return Vec::new();
    };
    if values.len() <= COLUMNS {
        return values.iter().copied().map(single).collect();
    }
    let width = (last - first) / COLUMNS as f64;
    let column = |x: f64| (((x - first) / width) as usize).min(COLUMNS - 1);
    values
        .chunk_by(|a, b| column(a.0) == column(b.0))
        .map(|values| {
            let mean = |of: fn(&(f64, f64)) -> f64| {
                values.iter().map(of).sum::<f64>() / values.len() as f64
            };
            let ys = || values.iter().map(|value| value.1);
            Point {
                x: mean(|value| value.0),
                y: mean(|value| value.1),
                low: ys().fold(f64::INFINITY, f64::min),
                high: ys().fold(f64::NEG_INFINITY, f64::max),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_values_are_drawn_unchanged() {
        let values = [(1.0, 5.0), (2.0, 4.0), (9.0, 3.0)];
        let series = Series::line("loss", "a", &values);
        let drawn: Vec<(f64, f64)> = series.points.iter().map(|p| (p.x, p.y)).collect();
        assert_eq!(drawn, values);
        assert!(!series.is_thinned());
        assert!(Series::line("loss", "a", &[]).points.is_empty());
    }

    #[test]
    fn many_values_keep_their_extremes_and_their_mean() {
        let mut values: Vec<(f64, f64)> = (0..60_000).map(|i| (i as f64, 2.0)).collect();
        values[31_234].1 = 9.0;
        values[31_235].1 = -1.0;
        let series = Series::line("loss", "a", &values);
        assert!(series.points.len() <= COLUMNS);
        assert!(series.is_thinned());
        let highest = series.points.iter().map(|p| p.high).fold(0.0, f64::max);
        let lowest = series.points.iter().map(|p| p.low).fold(0.0, f64::min);
        assert_eq!((lowest, highest), (-1.0, 9.0));
        let spike = series
            .points
            .iter()
            .find(|p| p.high == 9.0)
            .expect("a column");
        assert!((spike.y - (98.0 * 2.0 + 9.0 - 1.0) / 100.0).abs() < 1e-9);
    }

    #[test]
    fn steps_keep_only_changes() {
        let values: Vec<(f64, f64)> = (0..10_000)
            .map(|i| (i as f64, if i < 4_000 { 128.0 } else { 256.0 }))
            .collect();
        let series = Series::steps("batch", "a", &values, 10_000.0);
        let drawn: Vec<(f64, f64)> = series.points.iter().map(|p| (p.x, p.y)).collect();
        assert_eq!(drawn, [(0.0, 128.0), (4_000.0, 256.0), (10_000.0, 256.0)]);
        assert_eq!(series.shape, Shape::Steps);
        let restless: Vec<(f64, f64)> = (0..10_000).map(|i| (i as f64, (i % 7) as f64)).collect();
        let series = Series::steps("batch", "a", &restless, 10_000.0);
        assert_eq!(series.shape, Shape::Line);
        assert!(series.points.len() <= COLUMNS);
    }
}

//! Tables in plain text.

use anstyle::Style;

/// Headings and rows. A column is as wide as its widest cell; columns are two spaces apart.
pub struct Table<const N: usize> {
    headings: [&'static str; N],
    rows: Vec<[String; N]>,
}

impl<const N: usize> Table<N> {
    /// Creates an empty table.
    pub fn new(headings: [&'static str; N]) -> Self {
        Table {
            headings,
            rows: Vec::new(),
        }
    }

    pub fn row(&mut self, cells: [String; N]) {
        self.rows.push(cells);
    }

    /// The table's lines, each with a line feed; headings are bold (print with `anstream`).
    pub fn render(&self) -> String {
        let bold = Style::new().bold();
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells
                .chain([self.headings[column].len()])
                .max()
                .unwrap_or(0)
        };
        let widths: [usize; N] = std::array::from_fn(width);
        let line = |cells: [&str; N]| {
            let padded: Vec<String> = cells
                .iter()
                .zip(widths)
                .map(|(cell, width)| format!("{cell:width$}"))
                .collect();
            padded.join("  ").trim_end().to_owned()
        };
        let mut text = format!("{bold}{}{bold:#}\n", line(self.headings));
        for row in &self.rows {
            text += &line(row.each_ref().map(String::as_str));
            text.push('\n');
        }
        text
    }
}

//! Tables in plain text.

use anstyle::Style;

use crate::util::wrap;

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

    /// The table's lines, each with a line feed; headings are bold (print with `anstream`). `width`: columns for all of
    /// it. Cells of a wider table are broken between words; if that is not enough, the first column is above the others.
    pub fn render(&self, width: Option<usize>) -> String {
        let width = width.unwrap_or(usize::MAX);
        let headings: Vec<&str> = self.headings.to_vec();
        let rows = self.rows.iter();
        let rows: Vec<Vec<&str>> = rows
            .map(|row| row.iter().map(String::as_str).collect())
            .collect();
        if let Some(widths) = widths(&headings, &rows, width) {
            return drawn(&headings, &rows, &widths, 0);
        }
        let below = rows.iter().map(|row| row[1..].to_vec());
        let below: Vec<Vec<&str>> = below.collect();
        let Some(widths) = widths(&headings[1..], &below, width.saturating_sub(INDENT)) else {
            let natural = natural(&headings, &rows);
            return drawn(&headings, &rows, &natural, 0);
        };
        let bold = Style::new().bold();
        let mut text = format!("{bold}{}{bold:#}\n", headings[0]);
        text += &drawn(&headings[1..], &[], &widths, INDENT);
        for (row, below) in rows.iter().zip(below) {
            text += &format!("{}\n", row[0]);
            text += &body(&[below], &widths, INDENT);
        }
        text
    }
}

/// Columns before the cells that are below the first one.
const INDENT: usize = 2;

/// The widths without any break.
fn natural(headings: &[&str], rows: &[Vec<&str>]) -> Vec<usize> {
    let widest = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([headings[column].len()]).max().unwrap_or(0)
    };
    (0..headings.len()).map(widest).collect()
}

/// Widths of the columns with which the table is no wider than `width`, the widest columns narrowed first. `None`: its words
/// are too long.
fn widths(headings: &[&str], rows: &[Vec<&str>], width: usize) -> Option<Vec<usize>> {
    let mut widths = natural(headings, rows);
    let word = |text: &&str| text.split(' ').map(|word| word.chars().count()).max();
    let longest = |column: usize| {
        let cells = rows.iter().filter_map(|row| word(&row[column]));
        cells.chain(word(&headings[column])).max().unwrap_or(0)
    };
    let longest: Vec<usize> = (0..headings.len()).map(longest).collect();
    let between = 2 * headings.len().saturating_sub(1);
    while widths.iter().sum::<usize>() + between > width {
        let wide = (0..widths.len()).filter(|&column| widths[column] > longest[column]);
        let widest = wide.max_by_key(|&column| widths[column])?;
        widths[widest] -= 1;
    }
    Some(widths)
}

/// The lines of a table, from column `indent` on.
fn drawn(headings: &[&str], rows: &[Vec<&str>], widths: &[usize], indent: usize) -> String {
    let bold = Style::new().bold();
    let mut text = String::new();
    for line in lines(headings, widths) {
        text += &format!("{:indent$}{bold}{line}{bold:#}\n", "");
    }
    text + &body(rows, widths, indent)
}

fn body(rows: &[Vec<&str>], widths: &[usize], indent: usize) -> String {
    let lines = rows.iter().flat_map(|row| lines(row, widths));
    lines
        .map(|line| format!("{:indent$}{line}\n", ""))
        .collect()
}

/// The lines of a row.
fn lines(cells: &[&str], widths: &[usize]) -> Vec<String> {
    let cells = cells.iter().zip(widths);
    let cells: Vec<Vec<String>> = cells
        .map(|(cell, width)| wrap::cell(cell, *width))
        .collect();
    let height = cells.iter().map(Vec::len).max().unwrap_or(0);
    let line = |nth: usize| {
        let parts = cells.iter().zip(widths).map(|(cell, &width)| {
            let part = cell.get(nth).map_or("", String::as_str);
            format!("{part:width$}")
        });
        let parts: Vec<String> = parts.collect();
        parts.join("  ").trim_end().to_owned()
    };
    (0..height).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wide_table_breaks_its_cells_between_words() {
        let mut table = Table::new(["run", "committed samples", "phase"]);
        let failed = "failed: no space left on the device, after the checkpoint of step 40";
        table.row(["runs/quickstart", "480 of 480", failed].map(str::to_owned));
        table.row(["runs/b", "16 of 480", "finished"].map(str::to_owned));
        let shown = |width| anstream::adapter::strip_str(&table.render(width)).to_string();
        let lines = [
            "run              committed         phase",
            "                 samples",
            "runs/quickstart  480 of 480        failed: no",
            "                                   space left on",
            "                                   the device,",
            "                                   after the",
            "                                   checkpoint of",
            "                                   step 40",
            "runs/b           16 of 480         finished",
        ];
        assert_eq!(Vec::from_iter(shown(Some(50)).lines()), lines);
        // A run's name is for copying.
        let lines = [
            "run",
            "  committed      phase",
            "  samples",
            "runs/quickstart",
            "  480 of 480     failed: no",
            "                 space left on",
            "                 the device,",
            "                 after the",
            "                 checkpoint of",
            "                 step 40",
            "runs/b",
            "  16 of 480      finished",
        ];
        assert_eq!(Vec::from_iter(shown(Some(30)).lines()), lines);
        assert_eq!(shown(None), shown(Some(200)));
        assert_eq!(shown(None).lines().count(), 3);
    }
}

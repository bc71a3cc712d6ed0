//! Escaped text and tables in HTML.

/// Text as HTML text or as the value of a quoted attribute.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            _ => escaped.push(character),
        }
    }
    escaped
}

/// One cell of a table.
pub enum Cell {
    /// Text that may be broken into lines.
    Long(String),
    /// A number or short text on one line.
    Short(String),
}

/// A table, which scrolls sideways where the page is too narrow.
pub fn table(headings: &[&str], rows: &[Vec<Cell>]) -> String {
    let head: String = headings
        .iter()
        .map(|heading| format!("<th scope=\"col\">{}</th>", escape(heading)))
        .collect();
    let mut html = format!("<div class=\"scroll\"><table><thead><tr>{head}</tr></thead><tbody>\n");
    for row in rows {
        html += "<tr>";
        for cell in row {
            html += &match cell {
                Cell::Long(text) => format!("<td class=\"long\">{}</td>", escape(text)),
                Cell::Short(text) => format!("<td class=\"short\">{}</td>", escape(text)),
            };
        }
        html += "</tr>\n";
    }
    html + "</tbody></table></div>\n"
}

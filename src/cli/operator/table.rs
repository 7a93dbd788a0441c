//! Tables for people. What replicas say of themselves is shown, never obeyed: no
//! control character reaches a terminal.

/// Columns as wide as their widest cell, two blanks apart; nothing behind the
/// last.
pub(in crate::cli) fn render(head: &[&str], rows: &[Vec<String>]) -> String {
    let head: Vec<String> = head.iter().map(|&cell| cell.to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(&head)
        .chain(rows)
        .map(|row| row.iter().map(|cell| plain(cell)).collect())
        .collect();
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(&format!("{cell:<width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// In one line, with nothing that a terminal would obey.
pub(in crate::cli) fn plain(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '\n' | '\t' => ' ',
            // Also those that turn the direction of writing.
            c if c.is_control()
                || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}') =>
            {
                char::REPLACEMENT_CHARACTER
            }
            c => c,
        })
        .collect()
}

/// An empty cell is hard to see.
pub(in crate::cli) fn or_dash(text: &str) -> String {
    if text.is_empty() { "-" } else { text }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [
            vec!["a".to_owned(), "long cell".to_owned(), String::new()],
            vec!["bcd".to_owned(), "x".to_owned(), "y".to_owned()],
        ];
        assert_eq!(
            render(&["A", "BB", "C"], &rows),
            "A    BB         C\na    long cell\nbcd  x          y\n"
        );
    }

    #[test]
    fn no_control_character_reaches_a_terminal() {
        let text = render(&["A"], &[vec!["\u{1b}[2J\r\u{9b}x\ny\u{202e}".to_owned()]]);
        let shown = text.trim_end_matches('\n').lines().nth(1).unwrap();
        assert_eq!(shown, "\u{fffd}[2J\u{fffd}\u{fffd}x y\u{fffd}");
    }
}

//! Lines of styled text that fit a width, and tables that drop columns until they fit.

use unicode_width::UnicodeWidthChar;

use super::StdoutWriter;

/// Returns how many columns of a terminal the text takes: Chinese characters take two each, combining marks none.
pub fn columns(text: &str) -> usize {
    text.chars().filter_map(UnicodeWidthChar::width).sum()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// The style of a piece of text on a terminal. Elsewhere only the text is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextStyle {
    Plain,
    /// The header of a table.
    Head,
    /// The top line.
    Bar,
    Good,
    Bad,
    Warning,
    Faint,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StyledLine(pub Vec<(String, TextStyle)>);

impl StyledLine {
    pub fn plain(text: impl Into<String>) -> StyledLine {
        StyledLine(vec![(text.into(), TextStyle::Plain)])
    }

    pub fn styled(text: impl Into<String>, style: TextStyle) -> StyledLine {
        StyledLine(vec![(text.into(), style)])
    }

    pub fn text(&self) -> String {
        let text: String = self.0.iter().map(|(text, _)| text.as_str()).collect();
        text.trim_end().to_owned()
    }

    pub fn width(&self) -> usize {
        self.0.iter().map(|(text, _)| columns(text)).sum()
    }

    /// Cuts the line to a width. An ellipsis follows the part that is left.
    pub fn cut(mut self, width: usize) -> StyledLine {
        if self.width() <= width {
            return self;
        }
        let mut left = width.saturating_sub(1);
        for (text, _) in &mut self.0 {
            let mut fits = |c: &char| {
                let rest = left.checked_sub(columns(c.encode_utf8(&mut [0; 4])));
                // The first character that does not fit, which may be a wide one, ends the line.
                left = rest.unwrap_or(0);
                rest.is_some()
            };
            *text = text.chars().take_while(|c| fits(c)).collect();
        }
        if width > 0 {
            self.0.push(("…".into(), TextStyle::Plain));
        }
        self
    }
}

pub struct Column {
    pub title: &'static str,
    pub align: Align,
    /// Columns with the highest number are dropped first; columns with 0 never.
    pub drop_order: u8,
}

pub const fn column(title: &'static str, align: Align, drop_order: u8) -> Column {
    Column {
        title,
        align,
        drop_order,
    }
}

type Cell = (String, TextStyle);

/// A table. Each column is as wide as its widest cell.
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

const GAP: &str = "  ";

impl Table {
    pub fn with_header(columns: Vec<Column>) -> Table {
        Table {
            columns,
            rows: Vec::new(),
        }
    }

    /// Makes a table without a header, whose rows are [`Table::row`]s.
    pub fn new(columns: &[Align]) -> Table {
        Table::with_header(columns.iter().map(|align| column("", *align, 0)).collect())
    }

    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.styled_row(cells.map(|text| (text, TextStyle::Plain)));
    }

    pub fn styled_row<const N: usize>(&mut self, cells: [Cell; N]) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells.into());
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns the lines as plain text, without trailing spaces.
    pub fn lines(&self) -> Vec<String> {
        let lines = self.styled_lines(None);
        lines.iter().map(StyledLine::text).collect()
    }

    pub fn print(&self, out: &mut StdoutWriter, indent: &str) -> anyhow::Result<()> {
        let mut lines = self.lines().into_iter();
        lines.try_for_each(|line| out.line(&format!("{indent}{line}")))
    }

    /// Returns the header, if the columns have titles, then the rows.
    pub fn styled_lines(&self, width: Option<usize>) -> Vec<StyledLine> {
        let shown = self.fitting_columns(width.unwrap_or(usize::MAX));
        let titles = self.columns.iter().map(|column| column.title);
        let head: Vec<Cell> = titles
            .map(|title| (title.to_owned(), TextStyle::Head))
            .collect();
        let head = head
            .iter()
            .any(|(title, _)| !title.is_empty())
            .then_some(head);
        let line = |row: &Vec<Cell>| {
            let mut line = StyledLine::default();
            for (n, (at, cell_width)) in shown.iter().enumerate() {
                if n > 0 {
                    line.0.push((GAP.to_owned(), TextStyle::Plain));
                }
                let (text, style) = &row[*at];
                let padding = " ".repeat(cell_width - columns(text));
                let text = match self.columns[*at].align {
                    Align::Left => format!("{text}{padding}"),
                    Align::Right => format!("{padding}{text}"),
                };
                line.0.push((text, *style));
            }
            match width {
                Some(width) => line.cut(width),
                None => line,
            }
        };
        head.iter().chain(&self.rows).map(line).collect()
    }

    /// Returns the columns that fit, and their widths. A column without any text takes no room.
    fn fitting_columns(&self, width: usize) -> Vec<(usize, usize)> {
        let widest = |at: usize| self.rows.iter().map(|row| columns(&row[at].0)).max();
        let mut shown: Vec<(usize, usize)> = self
            .columns
            .iter()
            .enumerate()
            .filter_map(|(at, column)| {
                let widest = widest(at).filter(|widest| *widest > 0)?;
                Some((at, widest.max(columns(column.title))))
            })
            .collect();
        let drop_order = |at: usize| self.columns[at].drop_order;
        loop {
            let gaps = GAP.len() * shown.len().saturating_sub(1);
            let total: usize = shown.iter().map(|(_, width)| width).sum::<usize>() + gaps;
            let most = shown
                .iter()
                .map(|(at, _)| drop_order(*at))
                .max()
                .unwrap_or(0);
            if total <= width || most == 0 {
                return shown;
            }
            let last = shown.iter().rposition(|(at, _)| drop_order(*at) == most);
            last.map(|at| shown.remove(at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::with_header(vec![
            column("ID", Align::Left, 0),
            column("AGE", Align::Right, 1),
            column("NONE", Align::Left, 0),
            column("BY", Align::Left, 2),
        ]);
        let cells = |cells: [&str; 4]| cells.map(String::from);
        table.row(cells(["gwas-7", "3s", "", "ada"]));
        table.row(cells(["x", "12m", "", "bob"]));
        table
    }

    fn texts(width: Option<usize>) -> Vec<String> {
        let lines = table().styled_lines(width);
        lines.iter().map(StyledLine::text).collect()
    }

    #[test]
    fn columns_are_left_out_until_it_fits() {
        assert_eq!(
            texts(None),
            ["ID      AGE  BY", "gwas-7   3s  ada", "x       12m  bob"]
        );
        assert_eq!(
            texts(Some(11)),
            ["ID      AGE", "gwas-7   3s", "x       12m"]
        );
        assert_eq!(texts(Some(10)), ["ID", "gwas-7", "x"]);
        assert_eq!(
            texts(Some(4)),
            ["ID  …", "gwa…", "x   …"].map(|l| {
                // Padding counts: a cut is marked even where only spaces were cut off.
                let cut: String = l.chars().take(3).collect();
                format!("{cut}…")
            })
        );
        assert_eq!(texts(Some(0)), ["", "", ""]);
    }

    #[test]
    fn wide_characters_and_combining_marks_do_not_move_columns() {
        let mut table = Table::new(&[Align::Left, Align::Right, Align::Left]);
        for name in ["王小明", "e\u{301}\u{301}\u{301}va", "ada"] {
            table.row(["x", name, "|"].map(String::from));
        }
        let starts = |line: &String| line.split('|').next().map(columns);
        let lines = table.lines();
        assert_eq!(lines.iter().map(starts).collect::<Vec<_>>(), [Some(11); 3]);
        let cut = |width| StyledLine::plain("王小明").cut(width).text();
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 6].map(cut),
            ["", "…", "…", "王…", "王…", "王小…", "王小明"]
        );
    }

    #[test]
    fn no_line_is_wider_than_the_screen() {
        for width in 0..20 {
            let lines = table().styled_lines(Some(width));
            assert!(lines.iter().all(|line| line.width() <= width), "{width}");
        }
    }

    #[test]
    fn a_table_is_aligned_and_has_no_empty_columns_or_trailing_spaces() {
        let mut table = Table::new(&[Align::Left, Align::Right, Align::Left, Align::Left]);
        let row = |cells: [&str; 4]| cells.map(String::from);
        table.row(row(["ID", "SIZE", "", "NOTE"]));
        table.row(row(["gwas-7", "1 B", "", ""]));
        table.row(row(["ä", "12 KiB", "", "x"]));
        assert_eq!(
            table.lines(),
            [
                "ID        SIZE  NOTE",
                "gwas-7     1 B",
                "ä       12 KiB  x"
            ]
        );
    }
}
